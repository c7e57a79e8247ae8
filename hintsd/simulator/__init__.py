"""The I/O performance model of HDMLP (section 4) and the loading policies of its section 6."""
