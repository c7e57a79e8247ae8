"""Benchmarks: fusecache and its peers side by side in one run. Entry: tools/bench/run."""
