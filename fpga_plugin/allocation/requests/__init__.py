"""Who asks, and for what: the pod that has a device, and its FPGA_* request variables."""
