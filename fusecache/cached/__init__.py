"""One cache for the users of a host, and a mount's end of it (docs/CACHED.md)."""
