"""What is shown of simulated runs."""
