"""A training step, traced on fake tensors: operators, memory, activations saved for backward."""
