"""What tests share."""

PATIENCE_S = 120.0
"""How long a test waits for what must come, however busy the machine: less than its time limit."""
