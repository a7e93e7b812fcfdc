"""Kubelet on this node: its checkpoint and DRA state, PodResources, the Pods API, registration."""
