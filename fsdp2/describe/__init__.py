"""What was set on a model, what that costs, and whether ranks agree about it."""
