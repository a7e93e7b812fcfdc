"""Who asks, and for what: kubelet's records of pods, their cgroups, and their FPGA_* requests."""
