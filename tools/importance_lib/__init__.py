"""One training by importance after the other, from a slow origin. Entry: tools/importance."""
