"""What stands in for cards, their kernel and kubelet; unit tests and fuzzers share it."""

LIMIT = 60.0
"""Seconds after which a test gives up on what it waits for: no test needs a tenth of them, and a
machine may be many times slower, or busy."""
