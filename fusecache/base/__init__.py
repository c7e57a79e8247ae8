"""What every process of fusecache, and hintsd, may use: errors, units, mounts, trust, the wire."""
