"""What kubelet calls: one endpoint a resource, its registration, and kubelet's restarts.

`service` is the way in. Everything below it speaks kubelet's messages; everything behind it speaks
`fpga_plugin.claims.calls`.
"""
