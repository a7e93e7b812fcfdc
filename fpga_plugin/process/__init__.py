"""The plugin's own process: locks, threads, privileges, memory, files that it may trust."""
