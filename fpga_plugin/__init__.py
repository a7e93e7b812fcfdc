"""Kubernetes device plugin for FPGAs: programs a region for its container, scrubs it afterwards."""

__version__ = "0.1.0"
