"""Which part of a tensor a rank holds, as its DTensor says."""
