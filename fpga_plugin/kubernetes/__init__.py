"""What Kubernetes says: kubelet, the API server, pods and their cgroups. Nothing here knows FPGAs.

    kubelet     its records on disk, its gRPC services, its registry of plugins
    apiserver   objects as JSON, and their watches
    events      Kubernetes Events
    grpc        gRPC on unix sockets, with limits
    messages    generated from the .proto files beside it by `generate` (`make messages`)

`messages.v1beta1` is the device plugin API, `messages.v1` the PodResources API.
"""
