"""Python's views of the inode table, which is in C."""
