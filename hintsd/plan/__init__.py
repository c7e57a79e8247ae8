"""What a mount is told to stage, fetch, keep and pack (pure)."""
