"""Cards of the Linux Device Feature List (DFL) drivers, through sysfs and ioctls."""
