"""Mounts as services of systemd: the units, and their installation (docs/CONFIGURATION.md)."""
