"""hintsd.ImportanceSampler: which samples a training reads, by what it loses on them."""
