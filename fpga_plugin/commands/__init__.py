"""The commands of `fpga-plugin`, one module each."""
