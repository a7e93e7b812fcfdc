"""gRPC on unix sockets: servers with limits, unary calls, and decoding of untrusted messages."""
