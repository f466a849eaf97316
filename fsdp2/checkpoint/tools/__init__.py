"""What the command line does with checkpoints."""
