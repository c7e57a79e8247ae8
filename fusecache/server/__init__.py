"""The server process: entry and wiring."""
