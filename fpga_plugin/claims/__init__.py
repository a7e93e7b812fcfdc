"""What every door asks for: devices are allocated, prepared for a container, and released."""
