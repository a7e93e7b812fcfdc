"""gRPC servers on unix sockets for kubelet: what both doors need, not what they serve."""
