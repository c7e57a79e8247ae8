"""What is known of datasets and samplers: the files of the ones, the orders of the others."""
