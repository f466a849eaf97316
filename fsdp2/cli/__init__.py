"""The command ``fsdp2``."""
