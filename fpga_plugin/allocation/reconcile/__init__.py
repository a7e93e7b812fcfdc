"""Reconcile: compare the allocations with kubelet's records of them."""
