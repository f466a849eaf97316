"""`FSDPModule`: the methods that sharding adds to a module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from ..common.classes import original_class
from ..runtime.building import build_runtime
from ..runtime.events import registry
from ..runtime.runtime import Runtime, runtime_of
from ..runtime.unit import Unit, own_modules, unit_of, units_in
from .deepcopy import ToBeCopied
from .torch_compat import PipelineState, state_of

if TYPE_CHECKING:
    # For type checkers: every instance is an nn.Module, by its original class, and has the methods
    # of parts. At run time this is a mixin without fields, which goes in front of any class of
    # modules, and other libraries find that one as ``type(module).__mro__[2]``.
    from ..parts import PartMethods as _Base
else:
    _Base = object


class FSDPModule(_Base):
    """A sharded module: `fully_shard` makes its class a subclass of this and its original class.

    Outside of forward and backward, the parameters are DTensors that are sharded over the mesh.

    Example:
        >>> model = fully_shard(model)
        >>> isinstance(model, FSDPModule)
        True
        >>> model.set_requires_gradient_sync(False)  # the methods below
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct the original class."""
        # ``nn.Sequential`` and ``nn.ModuleList`` make slices by calling their own class: a slice is
        # a plain container of sharded modules, and no unit.
        return original_class(cls)(*args, **kwargs)

    # -- parameters by hand -----------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters, except the parameters of sharded submodules.

        The gather follows the mixed-precision policy. After a backward that raised, it first
        resets the model, as the next forward would.

        Args:
            async_op: return a handle at once instead of waiting. A forward waits automatically.

        Returns:
            A handle if ``async_op``, else None.

        Raises:
            RuntimeError: if parameters are on the meta device, or if a backward raised and
                gradients of earlier micro-batches are lost.

        Example:
            >>> handle = model.layers[0].unshard(async_op=True)
            >>> ...  # something else to compute
            >>> handle.wait()
        """
        unit, runtime = self._unit_and_runtime()
        runtime.unshard_for_user(unit)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's gathered parameters and register the sharded ones.

        Writes to the gathered parameters since `unshard` are lost, with a warning.
        """
        unit = unit_of(self)
        if unit.runtime is not None:
            runtime_of(unit).on.before_user_reshards(unit)
            unit.param_group.freezing.adopt()
            runtime_of(unit).reshard(unit)

    # -- settings ---------------------------------------------------------------------------

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients; if not, they accumulate unsharded.

        With `shard_model`'s strategy ``"optimizer"``, parameters stay gathered after a backward
        that does not sync gradients. Otherwise they are gathered as usual.

        Args:
            requires_gradient_sync: False for all but the last micro-batch, to accumulate
                gradients on this rank without reducing them.
            recurse: whether to set it for sharded submodules too.
        """
        units = self._units(recurse)
        for unit in units:
            unit.config.set_sync(requires_gradient_sync)
        registry.on.setting_changed(units, "sync_grads", requires_gradient_sync)

    def set_accumulate_sharded(self, accumulate_sharded: bool, *, recurse: bool = True) -> None:
        """Set whether backwards without gradient sync accumulate sharded gradients.

        Without gradient sync (see `set_requires_gradient_sync`, which pipeline schedules call),
        gradients accumulate unsharded by default. This takes one reduce-scatter per step, and
        memory for all whole gradients in the reduce dtype.

        With True, every backward reduce-scatters and adds to the sharded gradients. This takes one
        reduce-scatter per micro-batch, and memory for one or two units. On a 2-D mesh, the
        all-reduce still runs once per step, in the backward with sync. Shards accumulate in the
        parameters' dtype (on a 2-D mesh, in the reduce dtype).

        If a schedule computes weight gradients separately (zero bubble), they are reduced when
        the next forward or backward of this module begins, or at the end of the step.

        Args:
            accumulate_sharded: whether to accumulate shards; must be equal on all ranks.
            recurse: whether to set it for sharded submodules too.

        Example:
            >>> stage.submod.set_accumulate_sharded(True)
            >>> schedule.step(tokens)  # of torch.distributed.pipelining
        """
        for unit in self._units(recurse):
            unit.config.set_accumulate_sharded(accumulate_sharded)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward all-reduces gradients over replicas (2-D mesh).

        With False, backward only reduce-scatters gradients. The next backward with True
        all-reduces them.
        """
        for unit in self._units(recurse):
            unit.config.all_reduce_grads = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward waits at its end for gradient reductions in flight.

        With False, ``.grad`` may not be set yet for the units whose reductions started last.
        """
        self._unit_and_runtime()[1].is_last_backward = is_last_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change the ``reshard_after_forward`` argument of `fully_shard`.

        Raises:
            ValueError: if ``reshard_after_forward`` is not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}"
            )
        for unit in self._units(recurse):
            # The second resolves the first for this tree; it is set when the runtime is made.
            unit.config.reshard_after_forward = reshard_after_forward
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether to free parameters after backward.

        With False, they stay gathered for the next micro-batch. Set True again for the last
        micro-batch before the optimizer step, which changes only the shards.

        Between a forward and its backward, after ``set_is_last_backward(False)``, False registers
        the unsharded parameters and starts their gather at once. Pipelines that compute input and
        weight gradients separately (zero bubble) need this: they call ``parameters()`` at this
        point and look for the result in the graph.
        """
        units = self._units(recurse)
        for unit in units:
            unit.config.reshard_after_backward = reshard_after_backward
        registry.on.setting_changed(units, "reshard_after_backward", reshard_after_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether gathered parameters keep their memory, and so their addresses, when freed.

        CUDA graphs need this: a replay reads and writes the captured addresses. It costs the memory
        of all whole parameters. They are gathered as often as before.

        Args:
            keep: False releases the memory the next time the parameters are freed.
            recurse: whether to set it for sharded submodules too.

        Raises:
            RuntimeError: if `set_max_gathered_bytes` has set a limit.
        """
        units = self._units(recurse)
        for unit in units:
            registry.on.before_setting(unit, "keep_unsharded_storage", keep)
        for unit in units:
            unit.config.keep_unsharded_storage = keep
            unit.param_group.keep_storage(keep)

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather ``modules`` when this module's forward begins.

        This replaces the automatic choice: the module that ran next in the last forward. Several
        modules overlap more communication and need more memory.

        Raises:
            ValueError: if one of them is not an FSDPModule.
        """
        unit_of(self).forward_prefetch = units_of_all(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather ``modules`` when this module's backward begins.

        This replaces the automatic choice: the module that ran before this one in forward.

        Raises:
            ValueError: if one of them is not an FSDPModule.
        """
        unit_of(self).backward_prefetch = units_of_all(modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether to gather this module's parameters for backward. Not recursive.

        Use False for modules whose backward does not read their parameters. False is the default
        for an ``nn.Embedding``. If a hook, another method or another module makes backward read
        its weight after all, the weight keeps its memory after forward.
        """
        unit_of(self).config.unshard_in_backward = unshard_in_backward

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Make the next gathers wait for ``event`` only, not for all queued work.

        Args:
            event: recorded after the optimizer step. It is used once: set it on the root in every
                step.
        """
        self._unit_and_runtime()[1].optimizer_event = event

    def reset_iter_state(self) -> None:
        """Discard an iteration that raised.

        You do not need this to continue. The next forward or `unshard` recovers automatically and
        keeps earlier gradients in ``.grad``, so a failed micro-batch can be retried.

        This method frees all gathered parameters and drops all gradients, also the gradients of
        earlier micro-batches, reduced or not. A pending `GradientReductionHandle` becomes invalid.

        Raises:
            RuntimeError: if this is not the root.
        """
        unit, runtime = self._unit_and_runtime()
        runtime.check_root(unit, "reset_iter_state")
        runtime.reset(discard=True)

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters, whether sharded or gathered ones are registered.

        This includes gradients accumulated without gradient sync and gradients still being reduced
        (`set_is_last_backward`). ``set_to_none`` frees their memory, unless something else refers
        to a gradient.
        """
        units = self._units(recurse=True)
        runtimes = dict.fromkeys(runtime_of(u) for u in units if u.runtime is not None)
        for runtime in runtimes:
            # Of a backward that was not the last one: they would be attached after this.
            if not runtime.in_backward:
                runtime.complete_reductions()
            if not set_to_none:
                runtime.before_zero_grad()
        for unit in units:
            if unit.gradients.has_unreduced_from_before():
                runtime_of(unit).drop_gradients(unit)
            # What modules hold now may be unsharded: ``parameters()``, which the method of
            # `nn.Module` walks, would miss the gradients that the optimizer reads.
            for param in unit.params:
                # (No variable holds a gradient: its memory, which a caller might keep, would then
                # be left to it, and new tensors made in each step.)
                if param.sharded.grad is not None and set_to_none:
                    param.sharded.grad = None
                elif param.sharded.grad is not None:
                    param.sharded.grad.requires_grad_(False).zero_()
        super().zero_grad(set_to_none)  # parameters that no unit has
        for runtime in runtimes:
            runtime.release_gradients()

    # -- inside -----------------------------------------------------------------------------

    @override
    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Apply moves and casts (``.to``, ``.double``, ``to_empty``) to the sharded parameters."""
        unit = unit_of(self)
        # ``fn`` must find the sharded parameters: the next free would undo its changes to gathered
        # ones.
        if unit.runtime is not None:
            runtime = runtime_of(unit)
            if not runtime.in_backward:  # what is attached after this would not be cast
                runtime.complete_reductions()
            runtime.reshard(unit)
        # ``nn.Module._apply`` casts gradients with their parameters, and loses a ``grad_dtype``
        # that a user set: both are taken off and put back.
        unit.param_group.adopt_grad_dtypes()
        kept = unit.param_group.detach_gradients()
        registry.on.before_apply(unit, fn, own_modules(self, recurse))
        before = unit.param_group.where_shards_are()
        result = super()._apply(fn, recurse)
        # The Parameter objects stay the same, but their local tensors may be new ones, outside of
        # the storage of the bucket. A ``.to`` that changes nothing costs nothing, and is allowed
        # between forward and backward.
        unit.param_group.dirty |= unit.param_group.where_shards_are() != before
        registry.on.params_assigned(unit, True)
        unit.param_group.attach_gradients(kept)
        registry.on.after_apply(unit)
        return result

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Support `copy.deepcopy`."""
        # Not ``__deepcopy__``: wrappers that forward attributes, as ``torch.compile`` makes them,
        # would be mistaken for the module inside.
        return ToBeCopied.result, (ToBeCopied(self),)

    def _get_fsdp_state(self) -> PipelineState:
        state = state_of(self)
        assert state is not None
        return state

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing; torch's method selects the stream that allocates, which is fixed here."""

    def _units(self, recurse: bool) -> list[Unit]:
        return units_in(self) if recurse else [unit_of(self)]

    def _unit_and_runtime(self) -> tuple[Unit, Runtime]:
        unit = unit_of(self)
        if unit.runtime is None:
            build_runtime(self)
        return unit, runtime_of(unit)


def add_methods(methods: Mapping[str, object]) -> None:
    """Give all sharded modules ``methods``, by name."""
    for name, method in methods.items():
        setattr(FSDPModule, name, method)


class UnshardHandle:
    """Waits for a gather that `FSDPModule.unshard` started."""

    def __init__(self, unit: Unit | None = None) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Make the current stream wait for the gather, and register the unsharded parameters."""
        # Once: a second call would gather again what has been freed in between.
        unit, self._unit = self._unit, None
        if unit is not None:
            runtime_of(unit).wait_unshard(unit)
            runtime_of(unit).on.gathered_for_user(unit)


def units_of_all(modules: Iterable[Any]) -> list[Unit]:
    """The unit of each of ``modules``.

    Raises:
        ValueError: if one of them is not an FSDPModule.
    """
    modules = list(modules)
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
    return [unit_of(module) for module in modules]
