"""Which part of a tensor a rank holds, according to its DTensor."""
