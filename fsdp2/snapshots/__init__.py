"""Snapshots of the state of training in the memory of hosts, in the format of `checkpoint`."""

from .memory_snapshots import MemorySnapshots, Restored

__all__ = ["MemorySnapshots", "Restored"]
