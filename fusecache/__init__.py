"""fusecache: a FUSE cache mounted over a dataset directory (see docs/ARCHITECTURE.md)."""

__version__ = "0.1.0"
