"""Files of traces (docs/TRACES.md)."""
