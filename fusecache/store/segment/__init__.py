"""Segments: append-only files of records, and their bytes (docs/FORMAT.md)."""
