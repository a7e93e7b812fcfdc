"""Who may load what: the operator's policy, and the same as an admission policy of the cluster."""
