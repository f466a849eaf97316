"""Speeds of hardware: presets, files, and measurements of `fsdp2 measure`."""
