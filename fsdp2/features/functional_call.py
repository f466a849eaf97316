"""`torch.func.functional_call`: one forward with other parameters than the module's own.

A sharded tensor that a user passes in place of a parameter is made whole by DTensor's own
redistribution, which autograd sees: its gradient is averaged over the data-parallel ranks and
sharded like it. None of this runs in an ordinary forward.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType

import torch
from torch import nn
from torch._C import _functorch as functorch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.utils import stateless
from typing_extensions import override

from ..common.failures import explained
from ..runtime.events import UnitPart, registry
from ..runtime.registration import lenders
from ..runtime.unit import Unit
from ..sharding.param import ShardedParam

_CODE = stateless._functional_call.__code__


class FunctionalCall(UnitPart):
    """`torch.func.functional_call`, which only the stack tells from any other assignment."""

    def is_lending(self) -> bool:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is _CODE:
                return True
            frame = frame.f_back
        return False

    @override
    def before_tree(self, root_module: nn.Module, root: Unit, units: Sequence[Unit]) -> None:
        """
        Raises:
            RuntimeError: in the first forward of a tree inside such a call, if a unit that has run
                by itself is still gathered.
        """
        # A new runtime begins with units that are sharded, and with new unsharded parameters. To
        # free these would take away what functional_call has lent, and it would put the old ones
        # back.
        for unit in units if self.is_lending() else ():
            if unit.registration.registered != "sharded":
                raise RuntimeError(
                    f"The first forward of '{root.name}' is inside torch.func.functional_call, and "
                    f"unit '{unit.name}' is still gathered after a forward of its own. Call "
                    f"reshard() on that module before, or run '{root.name}' once without "
                    "functional_call"
                )

    def fits(self, given: object, param: ShardedParam) -> bool:
        # It must be laid out like the sharded parameter, or be what the parameter was before
        # sharding: the whole tensor (for a tensor-parallel parameter this rank's DTensor).
        own = param.unsharded
        if not isinstance(given, torch.Tensor) or own is None or param.extension:
            return False
        inner = given
        while functorch.is_functorch_wrapped_tensor(inner):
            inner = functorch.get_unwrapped(inner)
        if inner is not given and isinstance(inner, DTensor):
            return False  # DTensors do not work inside torch.vmap and the like
        # A tensor-parallel parameter is sharded over a mesh with the tensor-parallel dims: made
        # whole like below it would lose that part of its layout, too.
        return _like(given, own) or (param.tensor_parallel is None and _like(given, param.sharded))

    def whole_of(self, given: torch.Tensor, param: ShardedParam) -> torch.Tensor:
        own = param.unsharded
        assert own is not None
        whole = given.to(own.device, own.dtype if given.is_floating_point() else given.dtype)
        if _like(whole, own):
            return whole
        assert isinstance(whole, DTensor)
        dims = whole.device_mesh.ndim
        with explained(f"the all-gather of what functional_call got for '{param.fqn}'", None):
            whole = whole.redistribute(placements=[Replicate()] * dims)
        # Each rank computes with a batch of its own. `Replicate` would take one rank's gradient for
        # that of all.
        return whole.to_local(grad_placements=[Partial("avg")] * dims)


def _like(given: torch.Tensor, param: torch.Tensor) -> bool:
    if given.shape != param.shape or isinstance(given, DTensor) != isinstance(param, DTensor):
        return False
    if not isinstance(given, DTensor) or not isinstance(param, DTensor):
        return True
    return given.placements == param.placements and given.device_mesh == param.device_mesh


functional_call = FunctionalCall()
registry.add(functional_call)
lenders.append(functional_call)
