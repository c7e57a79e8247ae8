"""Hit ratios: access traces replayed through every policy of `hintsd.policies`."""
