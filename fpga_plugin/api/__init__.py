"""Kubelet's gRPC APIs: our .proto files, and the messages generated from them.

`messages.v1beta1` is the device plugin API, `messages.v1` the PodResources API. After a change of a
.proto file `python -m fpga_plugin.api.generate` makes them again.
"""
