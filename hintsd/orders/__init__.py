"""Orders in which datasets are read, as torch's samplers draw them."""
