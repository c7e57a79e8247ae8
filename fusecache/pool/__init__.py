"""Many hosts, one fetch: the engine that they share (docs/POOL.md)."""
