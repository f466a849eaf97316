"""`deterministic`: runs that can be repeated bit for bit."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ..transports.host.links import adds_by_host
from ..transports.host.meeting import ORDER

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_CUBLAS_VALUES = (":4096:8", ":16:8")  # what cuBLAS calls reproducible
_NCCL = "NCCL_ALGO"
# Rings and trees add in an order that follows from the ranks and the topology; these let switches
# add, in the order in which terms arrive.
_NO_SWITCHES = "^NVLS,NVLSTree,CollnetDirect,CollnetChain"
_SWITCHES = frozenset(("nvls", "nvlstree", "collnetdirect", "collnetchain"))
_SUMS = ("allreduce", "reduce", "reducescatter")


def deterministic(*, warn_only: bool = False) -> None:
    """Make the same program on the same ranks give the same bits in every run.

    Sums over ranks are added in an order that depends on the ranks alone: on gloo in rank order,
    on however many hosts they are; on NCCL by rings and trees, not in switches. Operators are
    PyTorch's deterministic ones, or raise. What remains is the program's: seeds, the order of the
    data, the number of ranks, and the versions of libraries and drivers. What each transport
    gives, and where gradients have the bits of ``DistributedDataParallel``: docs/gradients.md.

    Call it on all ranks, before the first CUDA operation and before process groups of NCCL are
    made. It sets, for this process and those that it starts: ``FSDP2_SUM_ORDER=rank``;
    ``torch.use_deterministic_algorithms(True)``; ``torch.backends.cudnn.benchmark = False``; where
    they are not set, ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` and ``NCCL_ALGO`` without NVLS and
    CollNet.

    It costs time: deterministic operators are slower, torch fills new memory with NaN (see
    ``torch.utils.deterministic.fill_uninitialized_memory``), and over several hosts each rank's
    gradients travel to their owners, instead of one sum of each host.

    Args:
        warn_only: operators that have no deterministic form warn instead of raising.

    Raises:
        RuntimeError: if it comes too late to have an effect (naming what was made before), or if
            the environment asks for the contrary.

    Example:
        >>> fsdp2.deterministic()
        >>> torch.manual_seed(0)
        >>> model = fsdp2.shard_model(model)
    """
    # All checks come first: where one fails, nothing is changed.
    cublas, nccl = _checked_cublas(), _checked_nccl()
    if adds_by_host():
        raise RuntimeError(
            "deterministic() came too late: gradients have been added host by host already. Call "
            f"it before the first forward, or set {ORDER}=rank in the environment"
        )
    os.environ[ORDER] = "rank"
    os.environ[_CUBLAS], os.environ[_NCCL] = cublas, nccl
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=warn_only)


def _checked_cublas() -> str:
    """The setting of cuBLAS, which reads it when a process uses it for the first time."""
    value = os.environ.get(_CUBLAS)
    if value is None:
        if torch.cuda.is_initialized():
            raise RuntimeError(
                f"deterministic() came too late: CUDA is in use, and {_CUBLAS} is not set. Call it "
                f"before the first CUDA operation, or set {_CUBLAS}={_CUBLAS_VALUES[0]}"
            )
        return _CUBLAS_VALUES[0]
    if value not in _CUBLAS_VALUES:
        raise RuntimeError(
            f"{_CUBLAS}={value} is not reproducible: set {' or '.join(_CUBLAS_VALUES)}"
        )
    return value


def _checked_nccl() -> str:
    """The algorithms of NCCL, which reads them when it is used for the first time."""
    value = os.environ.get(_NCCL)
    if value is None:
        if _has_nccl_group():
            raise RuntimeError(
                "deterministic() came too late: a process group of NCCL exists, and "
                f"{_NCCL} is not set. Call it before init_process_group, or set "
                f"{_NCCL}={_NO_SWITCHES}"
            )
        return _NO_SWITCHES
    by_switches = _by_switches(value)
    if by_switches:
        raise RuntimeError(
            f"{_NCCL}={value} lets switches add ({', '.join(by_switches)}), in an order that may "
            f"change: set {_NCCL}={_NO_SWITCHES}, or Ring or Tree"
        )
    return value


def _by_switches(value: str) -> list[str]:
    """The algorithms in switches that ``NCCL_ALGO`` permits for sums.

    It is a list of names, or of those to leave out after ``^``; since NCCL 2.24 also several,
    separated by semicolons, each for one function (``allreduce:ring``) or for all others.
    """
    permitted = dict.fromkeys(_SUMS, _SWITCHES)
    for part in value.lower().replace(" ", "").split(";"):
        function, _, names = part.rpartition(":")
        listed = set(names.removeprefix("^").split(","))
        for each in [function] if function else _SUMS:
            if each in permitted:
                permitted[each] = (
                    _SWITCHES - listed if names.startswith("^") else _SWITCHES & listed
                )
    return sorted(frozenset().union(*permitted.values()))


def _has_nccl_group() -> bool:
    return dist.is_initialized() and "nccl" in dist.get_backend_config()
