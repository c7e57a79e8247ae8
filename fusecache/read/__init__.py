"""How a read is answered, from the store or the origin."""
