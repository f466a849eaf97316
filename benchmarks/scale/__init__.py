"""How costs grow with the number of ranks, from synthesised ranks: `python -m benchmarks.scale`."""
