"""All tables and plots of the I/O simulator and the hit-ratio laboratory by one command, checked:
tools/simulate/run.
"""
