"""The plan channel: what is staged and fetched before it is read."""
