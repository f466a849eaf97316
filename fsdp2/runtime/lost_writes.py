"""Writes of the form ``param.data = tensor`` to sharded parameters: found before the next forward.

Such a write gives a tensor other memory. Of a DTensor it changes the wrapper only: the shard inside
stays as it was, and the write is lost without a word (so does
`torch.nn.utils.vector_to_parameters`). There is no hook for it. What it leaves behind is another
storage of the wrapper, so the addresses of these are compared: 0.2 microseconds per parameter and
forward, which is the price of never training on weights that were not loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..sharding.param import ShardedParam

_address_of = torch._C._storage_address  # type: ignore[attr-defined]


class LostWrites:
    """Remembers the storages of the sharded parameters of a unit."""

    def __init__(self) -> None:
        self._params: Sequence[ShardedParam] = ()
        self._sharded: list[torch.Tensor] = []
        self._locals: list[torch.Tensor] = []
        self._addresses: list[int] = []

    def follow(self, params: Sequence[ShardedParam]) -> None:
        """Look at ``params`` from now on.

        A write that was lost before is still found: only of parameters with a new local tensor the
        storage is taken to be right as it is.
        """
        known = {
            id(sharded): (local, address)
            for sharded, local, address in zip(
                self._sharded, self._locals, self._addresses, strict=True
            )
        }
        self._params = [param for param in params if param.is_sharded]
        self._sharded = [param.sharded for param in self._params]
        self._locals = [param.local for param in self._params]
        self._addresses = []
        for sharded, local in zip(self._sharded, self._locals, strict=True):
            before, address = known.get(id(sharded), (None, 0))
            self._addresses.append(address if before is local else _address_of(sharded))

    def check(self, unit_name: str) -> None:
        """Before the shards are read.

        Raises:
            RuntimeError: if a write was lost; once, as the parameters are put right.
        """
        if list(map(_address_of, self._sharded)) != self._addresses:
            self._refuse(unit_name)

    def _refuse(self, unit_name: str) -> None:
        lost = []
        for param, local, address in zip(self._params, self._locals, self._addresses, strict=True):
            if param.local is local and _address_of(param.sharded) != address:
                lost.append(param)
                with torch.no_grad():
                    param.sharded.data = param.sharded_spec.wrap(local)
        self._addresses = list(map(_address_of, self._sharded))
        self._locals = [param.local for param in self._params]
        if lost:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            raise RuntimeError(
                f"Parameter '{lost[0].fqn}'{more} of unit '{unit_name}' was written by "
                "`param.data = ...` (or vector_to_parameters), which does not reach the shard "
                "inside of a DTensor: the parameter is what it was before. Write into it: "
                f"model.load_state_dict({{'{lost[0].fqn}': whole}}, strict=False) takes whole "
                "tensors, `param.copy_(dtensor)` under torch.no_grad() a DTensor of the same shape"
            )
