"""What the examples share, and any training script has: options, text, processes, figures."""
