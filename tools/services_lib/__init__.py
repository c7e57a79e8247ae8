"""tools/services: the units of systemd, in a systemd that has booted."""
