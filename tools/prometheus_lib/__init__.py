"""tools/slurm: deploy/slurm with a slurmctld and a slurmd on this machine."""
