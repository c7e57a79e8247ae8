"""The process that holds a mount, and starts its server again."""
