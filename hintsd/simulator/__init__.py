"""How long training takes on a system that does not exist yet: HDMLP's performance model.

A `Scenario` is a system and a dataset (HDMLP, Table A.1); a strategy says where each sample is
read from; `clock` turns that into seconds. What each strategy does exactly, and the run times
beside the published ones: docs/SIMULATOR.md.

It simulates volumes, not content: nothing here reads a file of a dataset or waits.
"""
