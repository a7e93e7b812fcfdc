"""Who has what, and when it may be given out.

`state` holds the facts and commits each change; `allocations`, `resource_claims`, `work` and
`hardware` are the steps that change them; `obstacles` and `tenancies` answer what others ask.

    reconcile   what kubelet's records say that the plugin does not know
    journal     the facts on disk, and whether they may be believed
    requests    who asks, and for what
"""
