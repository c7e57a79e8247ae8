"""Cache directories and their disks: what may be one, and what its device can do."""
