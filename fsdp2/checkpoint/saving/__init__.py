"""From a model and an optimizer to a committed checkpoint."""
