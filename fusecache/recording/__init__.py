"""`fusecache trace`: what is read, on its way into a file (docs/TRACES.md)."""
