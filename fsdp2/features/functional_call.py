"""`torch.func.functional_call`: one forward with other parameters than the module's.

torch puts the given tensors into the modules before that forward, and restores the former ones
after it. The kernel is not aware of them: this part removes them from the modules of a unit while
it is gathered, then makes them whole and puts them in again, to compute.

DTensor's redistribution makes a sharded tensor whole that a user passes in place of a parameter.
Autograd sees this: the gradient is averaged over the data-parallel ranks and sharded like the
tensor. An ordinary forward only inspects the stack, once per tree.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import TypeGuard

import torch
from torch import nn
from torch._C import _functorch as functorch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.utils import stateless
from typing_extensions import override

from ..common.failures import explained
from ..runtime.events import TreePart, UnitPart, registry
from ..runtime.registration import Given, lenders, put
from ..runtime.runtime import Runtime, runtime_of
from ..runtime.schedule import Backward, Residency
from ..runtime.states import AfterForward
from ..runtime.unit import Forward, Unit, unit_of
from ..sharding.param import ShardedParam

_CODE = stateless._functional_call.__code__
# What to do after such a forward, by the kind of parameters that `functional_call` found: it
# restores these, so they must have memory then.
_AS_FOUND = {"unsharded": AfterForward.KEEP, "secondary": AfterForward.FREE_TO_SECONDARY}


def _is_lending() -> bool:
    """Whether this runs inside such a call; only the stack shows it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CODE:
            return True
        frame = frame.f_back
    return False


class FunctionalCall(TreePart):
    """Detects calls around forwards of one tree, or of modules in it.

    Attributes:
        lending: the tensors lent to the outermost forward that runs now; None: no tensors.
    """

    runtime: Runtime
    lending: _Lending | None = None

    @override
    def before_root_forward(self) -> None:
        if self.lending is not None:  # of a forward that raised
            self.lending.end()
        if _is_lending():
            put(self.runtime.root.of_parts.pop(FunctionalCall, ()))  # see `_FirstForward`
            self.lending = _Lending(self)
            # Before anything registers parameters, as a reset of the tree does.
            self.lending.take_out()

    def lend(self, unit: Unit, param: ShardedParam, given: torch.Tensor) -> None:
        """Let ``given`` compute in the place of ``param`` in the forward that begins."""
        if self.lending is None:  # the call is inside of the outermost forward
            self.lending = _Lending(self)
        if unit not in self.lending.lent:
            self.lending.found[unit] = unit.registration.registered
        self.lending.overrides.setdefault(unit, []).append((param, given))


class _Lending(TreePart):
    """Follows a tree through one outermost forward, for which tensors are lent to its modules.

    Attributes:
        lent: for each unit, the tensors in its modules when that forward began. The unit's forward
            may come later, and remove those that fit then.
        found: the kind of parameters registered in these units when tensors were lent to them.
        overrides: for each unit whose forward runs, the replaced parameters with the lent tensors.
    """

    runtime: Runtime

    def __init__(self, part: FunctionalCall) -> None:
        super().__init__(part.runtime)
        self.lent: dict[Unit, list[Given]] = {}
        self.found: dict[Unit, str] = {}
        self.overrides: dict[Unit, list[tuple[ShardedParam, torch.Tensor]]] = {}
        self._part, self._is_out = part, False
        self._residency = self.runtime.residency
        self.runtime.residency = _AsFound(self._residency, self)
        self.runtime.add(self)

    def end(self) -> None:
        """Stop following the tree."""
        self.runtime.remove(self)
        self.runtime.residency = self._residency
        self._part.lending = None

    def take_out(self) -> None:
        """Remove lent tensors from the modules until the forward of the root begins."""
        self._is_out = True
        for unit in self.runtime.units:
            given = _take_out(unit)
            if given:
                self.lent[unit], self.found[unit] = given, unit.registration.registered

    @override
    def forward_begins(self, unit: Unit) -> None:
        if self._is_out:
            self._is_out = False
            for given in self.lent.values():
                put(given)
        # A forward of the unit has raised, so no hook ran after it.
        if self.overrides.pop(unit, None) and self.runtime.in_backward:
            # This one recomputes an earlier one, with the module's own parameters.
            unit.registration.register(unit.registration.registered)

    @override
    def before_compute(self, unit: Unit) -> None:
        for param, given in self.overrides.get(unit, ()):
            _register(param, _whole_of(given, param))

    @override
    def forward_ends(self, unit: Unit, forward: Forward | None) -> None:
        overrides = self.overrides.pop(unit, None)
        if overrides:
            # At its end, `functional_call` restores the parameters that were registered at its
            # beginning. A unit that stays gathered would mistake these for a user's writes.
            if unit.registration.registered != self.found[unit]:
                unit.registration.register(self.found[unit])
            for param, given in overrides:
                _register(param, given)
        if self.runtime.schedule.root is unit and not unit.step.running:
            self.end()

    @override
    def planned(self, unit: Unit) -> None:
        # Its parameters are registered when it is planned before its forward, after a move.
        if unit in self.lent and not self._is_out and _is_lending():
            put(self.lent[unit])


class _AsFound(Residency):
    """Leaves units to which tensors are lent as `functional_call` has found them."""

    def __init__(self, usual: Residency, lending: _Lending) -> None:
        self._usual, self._lending = usual, lending

    @override
    def after_forward(self, unit: Unit, **facts: bool) -> AfterForward:
        after = self._usual.after_forward(unit, **facts)
        if unit in self._lending.overrides:
            after = _AS_FOUND.get(self._lending.found[unit], after)
        return after

    @override
    def frees_after_backward(self, unit: Unit, backward: Backward) -> bool:
        return self._usual.frees_after_backward(unit, backward)


class _FirstForward(UnitPart):
    """A tree may run for the first time inside such a call, whose tensors are in the modules."""

    @override
    def before_tree(self, root_module: nn.Module, root: Unit, units: Sequence[Unit]) -> None:
        """
        Raises:
            RuntimeError: in the first forward of a tree inside such a call, if a unit that has run
                alone is still gathered.
        """
        root.of_parts.pop(FunctionalCall, None)  # of a tree that could not be made
        if not _is_lending():
            return
        # A new runtime begins with sharded units and new unsharded parameters. Freeing the units
        # would remove the lent tensors, and functional_call would restore the old parameters.
        for unit in units:
            if unit.registration.registered != "sharded":
                raise RuntimeError(
                    f"The first forward of '{root.name}' is inside torch.func.functional_call, and "
                    f"unit '{unit.name}' is still gathered after a separate forward. Call "
                    f"reshard() on that module before, or run '{root.name}' once without "
                    "functional_call"
                )
        # Until the tree is made: units adopt the parameters they find, and would keep them.
        root.of_parts[FunctionalCall] = [given for unit in units for given in _take_out(unit)]


def _take_out(unit: Unit) -> list[Given]:
    """Let the modules of ``unit`` hold its parameters; returns the tensors in their places."""
    given = unit.registration.given_by_others()
    put((parameters, name, own, own) for parameters, name, _, own in given)
    return given


def _register(param: ShardedParam, value: torch.Tensor) -> None:
    for module, name in param.owners:
        module._parameters[name] = value  # type: ignore[assignment]


def _is_lent(top: nn.Module, param: ShardedParam, given: object) -> bool:
    """Whether ``given`` may compute in place of ``param`` of the unit of ``top``; records it."""
    unit = unit_of(top)
    part = None if unit.runtime is None else runtime_of(unit).part(FunctionalCall)
    if part is None or not _is_lending() or not _fits(given, param):
        return False
    part.lend(unit, param, given)
    return True


def _fits(given: object, param: ShardedParam) -> TypeGuard[torch.Tensor]:
    # It must be laid out like the sharded parameter, or like the parameter before sharding: the
    # whole tensor (for a tensor-parallel parameter, this rank's DTensor).
    own = param.unsharded
    if not isinstance(given, torch.Tensor) or own is None or param.extension:
        return False
    inner = given
    while functorch.is_functorch_wrapped_tensor(inner):
        inner = functorch.get_unwrapped(inner)
    if inner is not given and isinstance(inner, DTensor):
        return False  # DTensors do not work inside torch.vmap and the like
    # A tensor-parallel parameter is sharded over a mesh with the tensor-parallel dims: the code
    # below would also remove that part of its layout.
    return _like(given, own) or (param.tensor_parallel is None and _like(given, param.sharded))


def _whole_of(given: torch.Tensor, param: ShardedParam) -> torch.Tensor:
    """The tensor that computes for ``param.unsharded``; collective if ``given`` is sharded."""
    own = param.unsharded
    assert own is not None
    whole = given.to(own.device, own.dtype if given.is_floating_point() else given.dtype)
    if _like(whole, own):
        return whole
    assert isinstance(whole, DTensor)
    dims = whole.device_mesh.ndim
    with explained(f"the all-gather of what functional_call got for '{param.fqn}'", None):
        whole = whole.redistribute(placements=[Replicate()] * dims)
    # Each rank computes with a different batch. `Replicate` would use one rank's gradient for all.
    return whole.to_local(grad_placements=[Partial("avg")] * dims)


def _like(given: torch.Tensor, param: torch.Tensor) -> bool:
    if given.shape != param.shape or isinstance(given, DTensor) != isinstance(param, DTensor):
        return False
    if not isinstance(given, DTensor) or not isinstance(param, DTensor):
        return True
    return given.placements == param.placements and given.device_mesh == param.device_mesh


registry.add(FunctionalCall)
registry.add(_FirstForward())
lenders.append(_is_lent)
