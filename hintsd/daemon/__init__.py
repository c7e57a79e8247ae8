"""hintsd's process: its socket, its jobs, its links to mounts."""
