"""A training step, traced on fake tensors: operators, memory, what is saved for backward."""
