"""What an operator sees of all mounts of a host: asked at once, exported, summed up, checked."""
