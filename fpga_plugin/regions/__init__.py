"""The life of a claim: prepare, release, reconcile."""
