"""Dynamic Resource Allocation: the second door, beside the device plugin API."""
