"""Kubernetes Events: collected in bounded memory, and written through the API server."""
