"""All tables and plots of the I/O simulator by one command: tools/simulate/run."""
