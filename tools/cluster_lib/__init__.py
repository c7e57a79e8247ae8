"""tools/cluster: several hosts on one machine, for tests and people (`Cluster`, cluster.py)."""
