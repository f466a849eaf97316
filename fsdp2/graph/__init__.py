"""A training step as one graph: see `compile_step`."""

from .step import CompiledStep, compile_step

__all__ = ["CompiledStep", "compile_step"]
