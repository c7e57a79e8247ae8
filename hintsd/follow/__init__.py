"""Where a job's readers are in its access sequence (pure)."""
