"""A mesh whose ranks give up on each other after a second."""

import datetime

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def impatient_mesh() -> DeviceMesh:
    """All ranks, over a group of its own.

    The mesh equals no other, by the name of its dimension. torch caches the results of operations
    on DTensors by equal meshes: another test's DTensors would end up on this one, and fail where
    the machine is busy for a second.
    """
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("impatient",))
