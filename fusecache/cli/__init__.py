"""The commands of fusecache."""
