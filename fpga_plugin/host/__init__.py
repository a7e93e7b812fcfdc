"""The node and the process: locks, threads, the sandbox, trusted files, and small helpers."""
