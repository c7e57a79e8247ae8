"""Importance sampling: what losses are worth, and what is read in the next epoch by them."""
