"""What stands in for cards, their kernel and kubelet; unit tests and fuzzers share it."""
