"""Help for tests and measurements that have fewer devices than the real thing."""

from .link import Link, Transfer
from .simulated import SimulatedGroup, simulated_mesh

__all__ = ["Link", "SimulatedGroup", "Transfer", "simulated_mesh"]
