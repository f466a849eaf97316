"""Process groups of the library: beside one of the user's, with its backend and options.

``torch.distributed.new_group`` will not do. Under ``init_process_group(device_id=...)`` it splits
the communicator of the default group, which every rank of the *world* has to take part in: called
on a sub-mesh or by one pipeline stage, it hangs. Its names come from counters that ranks have to
advance together, and it forgets the timeout, the backend and the options of the group beside it.

`own_group` has two ways instead, and both are collective over the ranks concerned only:

- *split*: on an accelerator, the communicator of the group beside it is split, if its backend can.
  All of that group's ranks call, and its communicator is connected before: that is quick at any
  size, and ranks can tell from what they have which way the others go.
- *fresh*: a new rendezvous of the ranks at the store, without any split.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ..common.failures import explained

# Backends that have nothing to connect ahead of time: gloo does it when a group is made.
_CONNECTED = ("gloo", "fake", "mpi")


def own_group(
    beside: dist.ProcessGroup,
    device: torch.device,
    purpose: str,
    ranks: Sequence[int] | None = None,
    *,
    connect: bool = True,
) -> dist.ProcessGroup:
    """A new group with a communicator of its own; backend, options and timeout are ``beside``'s.

    Collective over ``ranks``, and over those of ``beside`` if they include ``ranks``: then each of
    them calls, for one of several subsets. Serves ``device`` only.

    Args:
        beside: a group that this rank is in.
        purpose: part of the group's name, and its description.
        ranks: global ranks, in the order that they are to have; None: those of ``beside``.
        connect: make the communicator now, before memory is scarce, and not at the first use.
    """
    theirs = dist.get_process_group_ranks(beside)
    chosen = tuple(theirs if ranks is None else ranks)
    with explained(f"making the process group '{purpose}'", chosen):
        if connect and set(chosen) <= set(theirs) and _splits(beside, device):
            group = _split(beside, device, purpose, [theirs.index(rank) for rank in chosen])
        else:
            group = _fresh(beside, device, purpose, chosen, connect)
        _register(group, chosen)
        if connect:
            connect_group(group, device)
    return group


def native_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """What serves ``device`` in ``group``; None for a group written in Python.

    Raises:
        RuntimeError: nothing serves it.
    """
    try:
        return group._get_backend(device)
    except NotImplementedError:
        return None
    except RuntimeError:
        if type(group) is dist.ProcessGroup:
            raise
        return None


def connect_group(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let ``group`` make its communicator now, by a small collective on the current stream.

    NCCL makes it at the first collective: buffers of hundreds of megabytes, at peak memory.
    """
    backend = None if device.type == "cpu" else native_backend(group, device)
    if backend is None or backend.name().lower() in _CONNECTED or group in _is_connected:
        return
    options = c10d.AllreduceOptions()
    options.asyncOp = False
    with explained("the first collective of a process group", group), torch.no_grad():
        work = group.allreduce([torch.zeros(1, device=device)], options)
        if work is not None:
            work.wait()
    _is_connected.add(group)


_is_connected: WeakSet[dist.ProcessGroup] = WeakSet()


# -- split -----------------------------------------------------------------------------------


def _splits(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``group`` can be split for ``device``; the same on all of its ranks."""
    if device.type == "cpu" or not native_backend(group, device).supports_splitting:
        return False
    if {kind.type for kind in group._device_types} == {device.type}:
        return True
    if "device_types" not in (dist.ProcessGroup.split_group.__doc__ or ""):
        return False
    # One device of several: the group's default backend must serve it. Where that is a plug-in,
    # torch 2.13 finds no default backend.
    return torch.__version__ >= "2.14" or group.name() != "undefined"


def _split(
    beside: dist.ProcessGroup, device: torch.device, purpose: str, numbers: Sequence[int]
) -> dist.ProcessGroup:
    # A communicator must be there, and idle, when it is split.
    connect_group(beside, device)
    torch.get_device_module(device).synchronize(device)
    options = _options(beside, device)
    only: dict[str, Any] = {"device_types": [torch.device(device.type)]}
    ranks = [dist.get_global_rank(beside, number) for number in numbers]
    group = beside.split_group(
        list(numbers),
        timeout=timeout_of(beside, device),
        opts=options,
        group_name=_name(purpose, ranks),  # type: ignore[arg-type]
        group_desc=purpose,
        **(only if len(beside._device_types) > 1 else {}),
    )
    assert group is not None
    group.bound_device_id = beside.bound_device_id
    world = c10d._world
    backend = _backend_names(beside, device)
    world.pg_map[group] = (backend, group.get_group_store())
    world.pg_names[group] = group.group_name
    world.pg_backend_config[group] = backend
    c10d._register_process_group(group.group_name, group)
    tag = f"ptd:{group.group_name}"
    world.tags_to_pg.setdefault(tag, []).append(group)
    world.pg_to_tag[group] = tag
    return group


# -- fresh -----------------------------------------------------------------------------------


def _fresh(
    beside: dist.ProcessGroup,
    device: torch.device,
    purpose: str,
    ranks: Sequence[int],
    connect: bool,
) -> dist.ProcessGroup:
    options = _options(beside, device)
    if hasattr(options, "split_from"):
        options.split_from = None  # what `beside` was split from
    with _without_binding() as bound:
        at_once = connect and bound is not None and bound.type == device.type
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            list(ranks),
            _backend_names(beside, device),
            c10d._get_default_store(),
            _name(purpose, ranks),  # type: ignore[arg-type]
            backend_options=options,
            timeout=timeout_of(beside, device),
            device_id=bound if at_once else None,
            group_desc=purpose,
        )
    assert isinstance(group, dist.ProcessGroup)  # what others than its ranks get is a number
    return group


@contextmanager
def _without_binding() -> Iterator[torch.device | None]:
    """Inside, the default group is bound to no device, so that torch does not split it."""
    default = c10d._get_default_group()
    bound = getattr(default, "bound_device_id", None)
    if bound is not None:
        default.bound_device_id = None
    try:
        yield bound
    finally:
        if bound is not None:
            default.bound_device_id = bound


# -- both ------------------------------------------------------------------------------------


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long a collective of ``group`` waits for the slowest rank."""
    try:
        options = native_backend(group, device).options
        return options._timeout
    except (AttributeError, RuntimeError, NotImplementedError):
        return dist.default_pg_timeout


def _options(group: dist.ProcessGroup, device: torch.device) -> Any:
    """A copy: backends write into what they are given."""
    backend = native_backend(group, device)
    try:
        return copy.deepcopy(backend.options)
    except (AttributeError, TypeError, RuntimeError, NotImplementedError):
        return None  # a backend without options: gloo, or one written in Python


def _backend_names(group: dist.ProcessGroup, device: torch.device) -> str:
    """As ``init_process_group`` takes it: "cuda:nccl"."""
    config = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return f"{device.type}:{config[device.type]}"


def _name(purpose: str, ranks: Sequence[int]) -> str:
    """The same on all ``ranks``, whatever other groups each of them has made, and new."""
    made = _num_made.setdefault(c10d._get_default_group(), Counter())
    key = (purpose, *ranks)
    made[key] += 1
    digest = hashlib.sha1(repr(key).encode(), usedforsecurity=False).hexdigest()
    return f"fsdp2_{digest}_{made[key]}"


# By default group: the store is its.
_num_made: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[Any, ...]]] = WeakKeyDictionary()


def _register(group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
