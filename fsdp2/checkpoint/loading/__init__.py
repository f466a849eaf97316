"""From an open checkpoint into the tensors of a model and an optimizer."""
