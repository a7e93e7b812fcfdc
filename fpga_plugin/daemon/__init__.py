"""The process: locks, logs, confinement, the order of start and end, supervision."""
