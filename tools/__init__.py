"""Tools of the repository: demo and benchmarks. Not part of the installed package."""
