"""Which log a job's samples are moved into, and when (pure)."""
