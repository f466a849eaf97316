"""How fast hardware is: presets, files, and what `fsdp2 measure` writes."""
