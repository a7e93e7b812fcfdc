"""Dynamic Resource Allocation: ResourceSlices, kubelet's calls for ResourceClaims, CDI files."""
