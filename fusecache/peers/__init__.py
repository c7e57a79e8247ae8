"""What other hosts of a pool are given by this one (docs/POOL.md, Peers)."""
