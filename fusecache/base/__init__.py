"""What every process of fusecache may use: errors, units, mounts, trust, the wire."""
