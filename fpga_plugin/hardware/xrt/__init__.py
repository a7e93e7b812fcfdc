"""AMD Alveo cards with XRT's drivers xclmgmt and xocl, through sysfs and DRM ioctls."""
