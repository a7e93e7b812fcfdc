"""PCI functions for containers, through vfio-pci: found, bound, held, asked what they are."""
