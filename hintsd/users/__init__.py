"""Users other than hintsd's own (docs/WIRE.md, "Other users"): the socket that they connect to, who
they are, what they may read, and how much they may ask for.
"""
