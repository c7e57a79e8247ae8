"""hintsd: the planning daemon that tells fusecache what will be read next (not built yet)."""
