"""Python's views of the inode table, which is in C; and which inodes are pinned (pins.py)."""
