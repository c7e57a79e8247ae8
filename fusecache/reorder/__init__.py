"""The log: samples in the order of an epoch (docs/LOG.md)."""
