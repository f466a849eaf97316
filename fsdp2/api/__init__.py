"""What users call: `fully_shard`, `FSDPModule`, whole tensors, strategies."""

from importlib import import_module

# Not as a statement: mypy would take names in `fsdp2/__init__.py` for modules.
import_module("fsdp2.parts")
