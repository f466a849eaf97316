"""Writes to sharded parameters that would be lost: to the wrapper of a shard."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from ..runtime.registration import write_guards
from ..sharding.param import ShardedParam

address_of = torch._C._storage_address  # type: ignore[attr-defined]
_kind = attrgetter("shape", "dtype", "device")


class LostWrites:
    """Finds writes ``param.data = tensor`` to sharded parameters, before the next forward.

    Such a write gives a tensor other memory. For a DTensor it changes the wrapper only: the shard
    inside stays as it was, and the write is silently lost (`torch.nn.utils.vector_to_parameters`
    writes like this). There is no hook for it. But the wrapper then has another storage, so the
    storages' addresses are compared. This takes 0.1 to 0.2 microseconds per parameter and forward,
    the price of never training on weights that were not loaded. No check of a whole unit would be
    sufficient: version counters do not change, and the reference count of a storage that wrappers
    share is unchanged if the writer keeps the old ``.data``.
    """

    def __init__(self) -> None:
        self._params: Sequence[ShardedParam] = ()
        self._sharded: list[torch.Tensor] = []
        self._locals: list[torch.Tensor] = []
        # They have no memory. They are held, since a second write could reuse a freed address.
        self._storages: list[torch.UntypedStorage] = []
        self._addresses: list[int] = []
        self._by_id: dict[int, int] | None = None  # of the parameter: its address

    def follow(self, params: Sequence[ShardedParam]) -> None:
        """Watch ``params`` from now on."""
        # The record of an unchanged parameter stays: units may be planned again between a write and
        # the forward that should find it (a thaw, a move of another parameter). If the local tensor
        # is new, the write went through the library, and the new storage is correct.
        rows = zip(self._sharded, self._locals, self._storages, strict=True)
        known = {(id(sharded), id(local)): storage for sharded, local, storage in rows}
        self._params = [param for param in params if param.is_sharded]
        self._sharded = [param.sharded for param in self._params]
        self._note([
            known.get((id(param.sharded), id(param.local)), param.sharded.untyped_storage())
            for param in self._params
        ])  # fmt: skip

    def is_intact(self, sharded: torch.Tensor) -> bool:
        """Whether the storage of this wrapper has the recorded address."""
        if self._by_id is None:  # most units are planned many times before a state dict asks
            self._by_id = dict(zip(map(id, self._sharded), self._addresses, strict=True))
        address = self._by_id.get(id(sharded))
        return address is None or address_of(sharded) == address

    def _note(self, storages: list[torch.UntypedStorage]) -> None:
        self._locals = [param.local for param in self._params]
        self._storages = storages
        self._addresses = [storage._cdata for storage in storages]
        self._by_id = None

    def check(self, unit_name: str) -> None:
        """Check for lost writes; called before the shards are read.

        Raises:
            RuntimeError: if a write was lost; once per write, as the parameters are repaired.
        """
        # One comparison of two lists of ints in C: this runs in every forward of every unit.
        if list(map(address_of, self._sharded)) != self._addresses:
            self._refuse(unit_name)

    def _refuse(self, unit_name: str) -> None:
        lost = []
        rows = zip(self._params, self._locals, self._addresses, strict=True)
        for param, local in [(p, mine) for p, mine, a in rows if address_of(p.sharded) != a]:
            with torch.no_grad():
                if param.local is local:
                    lost.append(param)
                    # The wrapper gets its shard back, or state dicts would save one tensor and
                    # steps train the other.
                    param.sharded.data = param.sharded_spec.wrap(local)
                elif type(local) is torch.Tensor and _kind(param.local) == _kind(local):
                    # `swap_tensors` exchanged what is in the object. Gathers read the old memory.
                    local.copy_(param.local)
                    param.attach(local)
        self._note([sharded.untyped_storage() for sharded in self._sharded])
        if lost:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            raise RuntimeError(
                f"Parameter '{lost[0].fqn}'{more} of unit '{unit_name}' was written by "
                "`param.data = ...` (or vector_to_parameters), which does not reach the shard "
                "inside a DTensor: the parameter is unchanged. To write to it: "
                f"model.load_state_dict({{'{lost[0].fqn}': whole}}, strict=False) takes whole "
                "tensors, `param.copy_(dtensor)` under torch.no_grad() a DTensor of the same shape"
            )


write_guards.append(LostWrites)
