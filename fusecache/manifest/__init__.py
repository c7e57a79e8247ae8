"""Manifests: which blocks each file of a dataset consists of (docs/FORMAT.md)."""
