"""Process groups of the library: each is made from a user's group, with its backend and options.

``torch.distributed.new_group`` will not do. Under ``init_process_group(device_id=...)`` it splits
the communicator of the default group, and every rank of the *world* must take part in that: called
on a sub-mesh or by one pipeline stage, it hangs. Its names come from counters that all ranks must
advance together, and it ignores the timeout, the backend and the options of its parent.

`own_group` makes groups in two ways, and both are collective over the ranks concerned only:

- *split*: on an accelerator, the communicator of the parent is split, if its backend can do so.
  All ranks of the parent call. This is fast at any size, since that communicator is connected
  already. Each rank can tell from its group which of the two ways the others take.
- *fresh*: a new rendezvous of the ranks at the store, without any split.
"""

from __future__ import annotations

import copy
import hashlib
import os
import socket
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ..common.collectives import sum_over
from ..common.failures import explained
from ..common.host import boot_id

# Backends with nothing to connect ahead of time: gloo connects when a group is made.
_CONNECTED = ("gloo", "fake", "mpi")


def own_group(
    parent: dist.ProcessGroup,
    device: torch.device,
    purpose: str,
    ranks: Sequence[int] | None = None,
    *,
    connect: bool = True,
) -> dist.ProcessGroup:
    """A new group with a separate communicator, and ``parent``'s backend, options and timeout.

    Collective over ``ranks``. If they are a subset of the ranks of ``parent``, all ranks of
    ``parent`` call, each for its own subset. The group serves ``device`` only.

    Args:
        parent: a group that includes this rank.
        purpose: part of the group's name, and its description.
        ranks: global ranks, in the order of their numbers in the group; None: all of ``parent``.
        connect: make the communicator now, before memory is scarce, and not at the first use.
    """
    theirs = dist.get_process_group_ranks(parent)
    chosen = tuple(theirs if ranks is None else ranks)
    with explained(f"making the process group '{purpose}'", chosen):
        if connect and set(chosen) <= set(theirs) and _splits(parent, device):
            group = _split(parent, device, purpose, [theirs.index(rank) for rank in chosen])
        else:
            group = _fresh(parent, device, purpose, chosen, connect)
        c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(chosen)}
        if connect:
            connect_group(group, device)
    return group


def native_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend that serves ``device`` in ``group``; None for a group written in Python.

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

    The ranks also exchange their hosts in it, for `num_hosts`.
    """
    # NCCL makes it at the first collective: hundreds of megabytes of buffers. In the first step
    # that is at peak memory, and while other ranks are in other collectives.
    backend = None if device.type == "cpu" else native_backend(group, device)
    if backend is None or backend.name().lower() in _CONNECTED or group in _num_hosts:
        return
    # NCCL identifies hosts by this. (Not LOCAL_WORLD_SIZE: it may differ between hosts, but the
    # results must be the same on all ranks.)
    name = os.environ.get("NCCL_HOSTID") or f"{socket.gethostname()} {boot_id()}"
    hosts = torch.zeros(group.size(), dtype=torch.int64, device=device)
    hosts[group.rank()] = zlib.crc32(name.encode())
    with torch.no_grad():
        sum_over(group, hosts, "the first collective of a process group")
    _num_hosts[group] = len(set(hosts.tolist()))


def num_hosts(group: dist.ProcessGroup | None) -> int:
    """Hosts of the ranks of ``group``, the same on all; 1 if `connect_group` did not ask."""
    return 1 if group is None else _num_hosts.get(group, 1)


_num_hosts: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


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
    parent: dist.ProcessGroup, device: torch.device, purpose: str, numbers: Sequence[int]
) -> dist.ProcessGroup:
    # NCCL can only split an existing communicator, and may deadlock if operations on it are
    # outstanding.
    connect_group(parent, device)
    torch.get_device_module(device).synchronize(device)
    options = _options(parent, device)
    only: dict[str, Any] = {"device_types": [torch.device(device.type)]}
    ranks = [dist.get_global_rank(parent, number) for number in numbers]
    group = parent.split_group(
        list(numbers),
        timeout=timeout_of(parent, device),
        opts=options,
        group_name=_name(purpose, ranks),  # type: ignore[arg-type]
        group_desc=purpose,
        **(only if len(parent._device_types) > 1 else {}),
    )
    assert group is not None
    # ``ProcessGroup.split_group`` registers nothing with torch. So the rest registers everything
    # that ``torch.distributed`` looks up for a group: backend and store, the name by which
    # functional collectives find it, and the tags that ``destroy_process_group`` uses.
    group.bound_device_id = parent.bound_device_id
    world = c10d._world
    backend = _backend_names(parent, device)
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
    parent: dist.ProcessGroup,
    device: torch.device,
    purpose: str,
    ranks: Sequence[int],
    connect: bool,
) -> dist.ProcessGroup:
    options = _options(parent, device)
    if hasattr(options, "split_from"):
        # They are a copy of `parent`'s, which may itself be split: NCCL would split that again.
        options.split_from = None
    with _without_binding() as bound:
        at_once = connect and bound is not None and bound.type == device.type
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            list(ranks),
            _backend_names(parent, device),
            c10d._get_default_store(),
            _name(purpose, ranks),  # type: ignore[arg-type]
            backend_options=options,
            timeout=timeout_of(parent, device),
            device_id=bound if at_once else None,
            group_desc=purpose,
        )
    assert isinstance(group, dist.ProcessGroup)  # (ranks outside the group get a number)
    return group


@contextmanager
def _without_binding() -> Iterator[torch.device | None]:
    """Context in which the default group is bound to no device, so that torch does not split it."""
    # There is no argument for that: the helper asks the default group, and ignores ``device_id``.
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
    """A copy of the backend's options, since a new group writes into its options."""
    backend = native_backend(group, device)
    try:
        return copy.deepcopy(backend.options)
    except (AttributeError, TypeError, RuntimeError, NotImplementedError):
        return None  # a backend without options: gloo, or one written in Python


def _backend_names(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backends in the form that ``init_process_group`` takes: "cuda:nccl"."""
    config = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return f"{device.type}:{config[device.type]}"


def _name(purpose: str, ranks: Sequence[int]) -> str:
    """A new name, the same on all ``ranks``, regardless of other groups that each has made."""
    # torch's counter is advanced by every group that a rank makes. If it were used for groups of
    # some ranks, the next group of all would have different names, and hang. So the count is per
    # purpose and ranks, which make these groups together. (A digest: names are keys of the store.)
    made = _num_made.setdefault(c10d._get_default_group(), Counter())
    key = (purpose, *ranks)
    made[key] += 1
    digest = hashlib.sha1(repr(key).encode(), usedforsecurity=False).hexdigest()
    return f"fsdp2_{digest}_{made[key]}"


# Keyed by default group, whose store has the keys: a new ``init_process_group`` restarts the names.
_num_made: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[object, ...]]] = WeakKeyDictionary()
