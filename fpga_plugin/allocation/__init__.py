"""Who has what, and when it may be given out.

`state` holds the facts and commits each change. `device_plugin_steps`, `dra_steps`, `work_steps`
and `hardware_steps` make the changes. `obstacles` and `tenancies` answer what others ask.

    reconcile   what kubelet's records say that the plugin does not know
    journal     the facts on disk, and whether they may be believed
    requests    who asks, and for what
"""
