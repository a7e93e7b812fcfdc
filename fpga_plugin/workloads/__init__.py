"""What containers get beside their devices: mounts, variables and nodes, by the operator's file."""
