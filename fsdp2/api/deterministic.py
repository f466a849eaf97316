"""`deterministic`: bitwise reproducible runs."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ..transports.host.links import adds_by_host
from ..transports.host.meeting import ORDER

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_CUBLAS_VALUES = (":4096:8", ":16:8")  # what cuBLAS calls reproducible
_NCCL = "NCCL_ALGO"
# Rings and trees add in an order that follows from the ranks and the topology. These algorithms let
# switches add, in the order in which terms arrive.
_NO_SWITCHES = "^NVLS,NVLSTree,CollnetDirect,CollnetChain"
_SWITCHES = frozenset(("nvls", "nvlstree", "collnetdirect", "collnetchain"))
_SUMS = ("allreduce", "reduce", "reducescatter")


def deterministic(*, warn_only: bool = False) -> None:
    """Make the same program on the same ranks give the same bits in every run.

    Sums over ranks then depend only on the ranks. On gloo, terms are added in rank order, for any
    number of hosts. On NCCL, rings and trees add them, and switches do not. Operators are
    PyTorch's deterministic ones, or raise. The program must fix the rest: seeds, the order of the
    data, the number of ranks, and the versions of libraries and drivers. docs/gradients.md lists
    the guarantees per transport, and when gradients equal ``DistributedDataParallel``'s bitwise.

    Call it on all ranks, before the first CUDA operation and before creating NCCL process groups.
    It sets, for this process and its child processes:

    - ``FSDP2_SUM_ORDER=rank``;
    - ``torch.use_deterministic_algorithms(True)``;
    - ``torch.backends.cudnn.benchmark = False``;
    - unless they are set, ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` and ``NCCL_ALGO`` without NVLS and
      CollNet.

    This costs time. Deterministic operators are slower, and torch fills new memory with NaN (see
    ``torch.utils.deterministic.fill_uninitialized_memory``). With several hosts, each rank sends
    its gradients to their owners, instead of one sum per host.

    Args:
        warn_only: operators without a deterministic implementation warn instead of raising.

    Raises:
        RuntimeError: if it is called too late to have an effect (the message names what exists
            already), or if the environment requests the opposite.

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

    The value is a list of names, or after ``^`` of names to exclude. Since NCCL 2.24 it may be
    several lists, separated by semicolons, each for one function (``allreduce:ring``) or for all
    others.
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
