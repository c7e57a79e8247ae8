"""Policies of the papers, and what they share (docs/POLICIES.md)."""
