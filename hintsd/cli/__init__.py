"""The commands of hintsd."""
