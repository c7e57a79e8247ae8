"""Attacks on a live fusecache (tools/campaign, docs/CAMPAIGN.md)."""
