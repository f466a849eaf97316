"""Reports a model's settings and their cost, and whether ranks agree on them."""
