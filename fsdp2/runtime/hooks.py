"""The hooks of a unit: on its modules' forward, and on the borders of its part of the graph.

Forward hooks call the runtime before and after forward. For backward, a hook on each output tensor
reports that backward is about to enter the unit. At the input, a view replaces the tensor, and a
hook on the view's node reports that backward has left the unit. The engine reaches this node when
the gradient of the input is complete, after every operator of the unit that uses it. Unlike the
result of an autograd function, a view may be changed in place.

If no input needs a gradient (integer ids), there is no such node. Then hooks on the accumulation of
the parameters' gradients start the reduction after the last one. They free nothing, since a frozen
weight may still be needed for an input gradient.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from ..common.pytree import cast_floating, map_tensors, tensors_in
from ..dtensor.placement import own_part
from .building import build_runtime
from .events import registry
from .registration import ModulesChanged
from .runtime import Runtime, runtime_of
from .torch_modes import (
    function_mode,
    is_transformed,
    outside_torch_modes,
    replacing,
    skip_compile,
)
from .unit import Forward, Unit, units_holding

Grads = Sequence[torch.Tensor | None]
Leave = Callable[[Grads], None]


class Crossing:
    """Detects that backward leaves a forward with several nodes, when the last of them runs.

    It does not refer to the nodes, since they refer to it: if a graph is dropped without a
    backward, a cycle would keep everything the graph has saved until the garbage collector runs.
    Handles of their hooks show which nodes still exist.
    """

    __slots__ = ("_awaited", "_backward", "_handles", "_leave", "_pass_on", "_runtime")

    def __init__(self, runtime: Runtime, leave: Leave, pass_on: Leave) -> None:
        """
        Args:
            leave: called with the gradients at the last node.
            pass_on: called with those at the others.
        """
        self._runtime, self._leave, self._pass_on = runtime, leave, pass_on
        self._handles: list[RemovableHandle] = []
        self._awaited = 0
        self._backward: object = None

    def watch(self, node: Any, crossed: Leave | None = None) -> None:
        """Watch ``node``, of an input or of what changed one, with a hook that calls `crossed`."""
        self._handles.append(node.register_prehook(crossed or self.crossed))

    def crossed(self, grads: Grads, num_nodes: int = 1) -> None:
        """Backward has come to one node, and will not come to the other ``num_nodes - 1``."""
        if self._backward is not self._runtime.backward:
            # Nodes of inputs that nothing has used are gone. If backward does not reach one of the
            # others, the rest is done when it ends.
            self._backward = self._runtime.backward
            self._awaited = sum(handle.hooks_dict_ref() is not None for handle in self._handles)
        self._awaited -= num_nodes
        (self._pass_on if self._awaited > 0 else self._leave)(grads)


def watch_base(base: torch.Tensor, inputs: object, enter: Callable[..., None]) -> None:
    """Watch the node that made ``base``; an output is a view of it.

    Changing the view in place rewrites its history, and the hook on it is lost.
    """
    # If the base is an input, another module made it, and backward gets there after this unit.
    given = any(t is base or t._base is base for t in tensors_in(inputs))
    if base.grad_fn is not None and not given:
        base.grad_fn.register_prehook(enter)


class Border(torch.autograd.Function):
    """Identity on several tensors, with one node; its backward reports and passes gradients.

    For tensors that cannot be viewed.
    """

    @staticmethod
    @override
    def forward(ctx: Any, leave: Leave, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # else an input that is not used costs a tensor of zeros
        ctx.leave = leave
        return tensors

    @staticmethod
    @override
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.leave(grads)
        return (None, *grads)


class Marks(Protocol):
    """Another way to mark inputs and outputs."""

    def mark_inputs(self, leave: Leave, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Replacements of ``inputs``; backward calls ``leave`` with their gradients."""

    def mark_output(self, enter: Callable[[Any], None], output: torch.Tensor) -> torch.Tensor:
        """The replacement of ``output``; backward calls ``enter`` with its gradient."""


# Inside a transform of ``torch.func``, where hooks on tensors and their nodes are lost; the last
# one is used.
marks_in_transforms: list[Marks] = []


class UnitHooks:
    """Hooks of one unit, registered on its modules."""

    # These are asked in turn for hooks of another class: see `made_for`.
    kinds: ClassVar[list[Callable[[Unit], type[UnitHooks] | None]]] = []

    @staticmethod
    def made_for(unit: Unit) -> UnitHooks:
        """The hooks of ``unit``, which become its attribute ``hooks``."""
        found = (kind(unit) for kind in UnitHooks.kinds)
        made = unit.hooks = next(filter(None, found), UnitHooks)(unit)
        return made

    # Called after forward with its inputs. `StepState.input_nodes` maps the id of each view of an
    # input to its node and the object that watches it.
    input_followers: ClassVar[list[Callable[[UnitHooks, tuple, dict], None]]] = []

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        policy = unit.config.mp_policy
        self._cast_input = (
            cast_floating(policy.param_dtype)
            if policy.param_dtype is not None and policy.cast_forward_inputs
            else None
        )
        self._cast_output = (
            cast_floating(policy.output_dtype) if policy.output_dtype is not None else None
        )
        self.inside_method = False  # in a method that runs like a forward
        # For units whose inputs need no gradient.
        self._watching = False
        self._watched: list[RemovableHandle] = []
        self._watched_generation = -1
        self._num_accumulated = 0
        # Methods that run like a forward: the owner, the name, the method, and its wrapper.
        self.methods: list[tuple[nn.Module, str, Callable[..., Any], Callable[..., Any]]] = []
        self.pre_forward_hook = skip_compile(self.pre_forward)
        self.post_forward_hook = skip_compile(self.post_forward)

    def install(self) -> None:
        """Register the hooks of forward."""
        # Before the pre-hooks and after the hooks that a module has already: these may compute with
        # its parameters, as the hooks of `torch.nn.utils.weight_norm` do. Hooks that are registered
        # later see the sharded parameters after forward.
        for module in self.unit.modules:
            module.register_forward_pre_hook(self.pre_forward_hook, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.post_forward_hook, with_kwargs=True)

    def take_over(self, other: UnitHooks, module: nn.Module) -> None:
        """Put these hooks in the places of ``other``'s, which a copied module still holds."""
        # In their places, not at the end: the order among users' hooks is part of the module.
        for hooks, old, new in (
            (module._forward_pre_hooks, other.pre_forward_hook, self.pre_forward_hook),
            (module._forward_hooks, other.post_forward_hook, self.post_forward_hook),
        ):
            hooks.update({key: new for key, hook in hooks.items() if hook is old})

    # -- forward ----------------------------------------------------------------------------

    def pre_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if self.inside_method:
            return self._cast_inputs(args, kwargs)
        outside_torch_modes(self._gather, module)
        # Inside the modes again: stand-ins for parameters and the cast of inputs are part of the
        # user's computation, which transforms and autograd must see.
        self.unit.runtime.on.before_compute(self.unit)
        args, kwargs = self._cast_inputs(args, kwargs)
        if torch.is_grad_enabled():
            if self.unit.step.running <= 1:
                # From forwards that raised, and from inputs that a user's hook has replaced.
                self.unit.step.input_nodes = {}
            if not torch._C._len_torch_function_stack():
                return self._mark_inputs(args, kwargs)
            return replacing((args, kwargs), self._mark_inputs, args, kwargs)
        return args, kwargs

    def _gather(self, module: nn.Module) -> None:
        unit = self.unit
        called = module if len(unit.modules) > 1 else None
        runtime = build_runtime(module) if unit.runtime is None else runtime_of(unit)
        try:
            runtime.pre_forward(unit, called)
        except ModulesChanged:
            root = runtime.root
            new = build_runtime(module if unit is root else root.modules[0])
            new.is_last_backward = runtime.is_last_backward
            runtime_of(unit).pre_forward(unit, called)

    def follow_state_dicts(self) -> None:
        """Let ``state_dict`` see the parameters of the unit in all modules that have any."""
        for owner in dict.fromkeys(m for p in self.unit.params for m, _ in p.owners):
            if self.unit not in units_holding([owner]):
                StateDictHooks(self.unit).install(owner)

    def _cast_inputs(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        unit = self.unit
        # As torch's `fully_shard` does: the root takes a batch that is still on the host.
        if unit.device.type != "cpu" and unit is runtime_of(unit).root:
            args, kwargs = map_tensors(self._to_device, (args, kwargs))
        if self._cast_input is not None:
            args, kwargs = map_tensors(self._cast_input, (args, kwargs))
        return args, kwargs

    def post_forward(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        # Modes must not see this: it is not the user's computation.
        if torch._C._len_torch_function_stack() and function_mode() is not None:
            return replacing(output, self.post_forward, module, args, kwargs, output)
        if self.inside_method:
            return self._cast(output)
        unit = self.unit
        differentiable = False
        forward = Forward(unit)
        enter = functools.partial(self.enter_backward, forward)
        if unit.step.input_nodes:
            for follow in self.input_followers:
                follow(self, args, kwargs)
        if is_transformed() and marks_in_transforms:
            marks = marks_in_transforms[-1]
            differentiable = any(tensor.requires_grad for tensor in tensors_in(output))
            output = map_tensors(functools.partial(marks.mark_output, enter), output)
        elif torch.is_grad_enabled():
            for tensor in (output,) if type(output) is torch.Tensor else tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(enter)
                    differentiable = True
                    if tensor._base is not None:
                        watch_base(tensor._base, (args, kwargs), enter)
        outside_torch_modes(
            runtime_of(unit).post_forward, unit, differentiable=differentiable, forward=forward
        )
        return output if self._cast_output is None else self._cast(output)

    def _cast(self, output: Any) -> Any:
        return output if self._cast_output is None else map_tensors(self._cast_output, output)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.unit.device, non_blocking=True)

    # -- the borders of backward ------------------------------------------------------------

    def _mark_inputs(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Put a node on the inputs whose backward runs after the whole unit's."""
        # Not a full backward hook of nn.Module: that wraps inputs and outputs in its own nodes,
        # forbids changing them in place, and reaches only tensors in positional arguments.
        marks = marks_in_transforms[-1:] if is_transformed() else None
        self._watching = False
        if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor and not marks:
            if args[0].requires_grad:  # the usual case
                marked = args[0].view_as(args[0])
                node: Any = marked.grad_fn
                handle = node.register_prehook(self.leave_backward)
                if self.input_followers:
                    self.unit.step.input_nodes[id(marked)] = node, handle
                return (marked,), kwargs
            self._watch_accumulation()
            return args, kwargs
        given = list(tensors_in((args, kwargs)))
        found = {id(tensor): tensor for tensor in given if tensor.requires_grad}
        if not found:
            self._watch_accumulation()
            return args, kwargs
        if marks:
            all_marked = marks[0].mark_inputs(self.leave_backward, list(found.values()))
        elif not all(map(self._has_views, found.values())):
            all_marked = Border.apply(self.leave_backward, *found.values())
        else:
            crossing = self.crossing()
            all_marked = [tensor.view_as(tensor) for tensor in found.values()]
            for marked in all_marked:
                crossing.watch(marked.grad_fn)
                if self.input_followers:
                    self.unit.step.input_nodes[id(marked)] = marked.grad_fn, crossing
        replaced = dict(zip(found, all_marked, strict=True))
        return map_tensors(lambda t: replaced.get(id(t), t), (args, kwargs))

    def _has_views(self, tensor: torch.Tensor) -> bool:
        """Whether a view of the whole tensor can replace ``tensor``."""
        plain = type(tensor) is torch.Tensor or type(tensor) is nn.Parameter
        return plain and tensor.layout is torch.strided and not tensor.is_nested

    def crossing(self) -> Crossing:
        """An object that detects when backward has left by the last of several nodes."""
        return Crossing(runtime_of(self.unit), self.leave_backward, self.tell_left)

    def enter_backward(self, forward: Forward, grad: Any) -> None:
        """Backward reached an output of the unit, of that ``forward``."""
        outside_torch_modes(self._enter_backward, forward)

    def _enter_backward(self, forward: Forward) -> None:
        unit = self.unit
        runtime = runtime_of(unit)
        if unit.step.backward_began:  # at another output
            runtime.pre_backward(unit, forward)
            return
        self._num_accumulated = 0
        # Only now, while the engine runs, can one ask which nodes it will execute. A run without
        # `inputs` accumulates everything. Only such a run may have reentrant checkpoints, whose
        # nodes belong to another run inside this one.
        everything = Variable._execution_engine.is_checkpoint_valid()
        accumulates = everything or unit.gradients.will_accumulate()
        runtime.pre_backward(unit, forward, accumulates=accumulates)

    def leave_backward(self, grads: Sequence[torch.Tensor | None] = ()) -> None:
        """Backward left the unit through its inputs, whose gradients are ``grads``."""
        outside_torch_modes(runtime_of(self.unit).post_backward, self.unit)
        if torch.is_grad_enabled():
            self.tell_left(grads)

    def tell_left(self, grads: Sequence[torch.Tensor | None]) -> None:
        """With create_graph=True: ``grads`` are what backward left this unit with."""
        runtime_of(self.unit).on.left_with_graph(self.unit, grads)

    def _watch_accumulation(self) -> None:
        """No input needs a gradient: count accumulated gradients instead."""
        # Chosen again in each forward: the input of the same unit may need a gradient in one
        # (saliency, adversarial batches) and not in the next.
        self._watching = True
        self.notice_accumulation()

    def notice_accumulation(self) -> None:
        """Call `_accumulated` whenever autograd has accumulated a gradient."""
        unit = self.unit
        if self._watched_generation == unit.param_group.generation:
            return
        # The hooks are on the unsharded parameters, which stay the same until the unit is planned
        # again or thawed. Registering them in each forward would cost per parameter and step.
        self._watched_generation = unit.param_group.generation
        for handle in self._watched:
            handle.remove()
        myself = weakref.ref(self)

        def accumulated(param: torch.Tensor) -> None:
            # The garbage collector does not see what hooks of tensors hold: with a strong
            # reference, a sharded model would never be freed.
            hooks = myself()
            if hooks is not None:
                hooks._accumulated()

        self._watched = [
            p.unsharded.register_post_accumulate_grad_hook(accumulated)
            for p in unit.params
            if p.unsharded is not None and p.unsharded.requires_grad
        ]

    def _accumulated(self) -> None:
        unit = self.unit
        # A unit whose parameters were used without a forward (`unshard`) has no hook on an output:
        # for the runtime, this may be the first sign of the backward.
        runtime = runtime_of(unit)
        runtime.begin_backward()
        # Ranks that use different parameters count different gradients. They reduce at the end of
        # backward, which all of them reach.
        if not self._watching or unit.config.reduce_unused:
            return
        self._num_accumulated += 1
        if self._num_accumulated >= len(self._watched):
            runtime.reduce(unit)


def hooks_of(unit: Unit) -> UnitHooks:
    """The hooks on the modules of ``unit``."""
    return unit.hooks  # type: ignore[return-value]


def about_to_write(unit: Unit) -> None:
    """Reshard ``unit``, whose sharded parameters are about to be loaded."""
    if unit.runtime is not None:
        runtime = runtime_of(unit)
        runtime.on.before_shards_written(unit)
        runtime.reshard(unit)  # gathered values are about to be out of date
        # The load comes after the optimizer step that the event marks: with it, the next gather
        # would read the shards before they are written.
        runtime.optimizer_event = None
    else:
        registry.on.params_assigned(unit, False)


def _is_whole(value: Any, param: DTensor) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, DTensor)
        and value.shape == param.shape
    )


class StateDictHooks:
    """Let ``state_dict`` and ``load_state_dict`` see the sharded parameters at any time.

    Installed on each module that owns parameters of ``unit``. Bound methods, since `copy.deepcopy`
    copies what they are bound to.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self._entered: list[AbstractContextManager[None]] = []

    def install(self, module: nn.Module) -> None:
        module.register_state_dict_pre_hook(self.before_save)
        # torch sets an attribute on this hook, which a bound method does not take.
        module.register_state_dict_post_hook(functools.partial(self.after_save))
        module.register_load_state_dict_pre_hook(self.before_load)
        module.register_load_state_dict_post_hook(self.after_load)

    def before_save(self, module: nn.Module, *_: Any) -> None:
        if self.unit.runtime is not None:
            runtime_of(self.unit).on.before_shards_read(self.unit, "saved")
        # The hooks of all modules of a unit run in turns: looking at all of its parameters in each
        # would take time with the square of their number (a second for a model in one unit).
        if self.unit.registration.shows_sharded(module):
            self._entered.append(nullcontext())
            return
        self.unit.registration.check_writes()
        # A stack: ``state_dict`` of a module calls the ``state_dict`` of its children before the
        # post-hook, and both may own parameters of this unit.
        self._entered.append(self.unit.registration.showing_sharded())
        self._entered[-1].__enter__()

    def after_save(self, *_: Any) -> None:
        self._entered.pop().__exit__(None, None, None)

    def before_load(
        self, module: nn.Module, states: dict[str, Any], prefix: str, metadata: dict, *_: Any
    ) -> None:
        about_to_write(self.unit)
        # With ``assign=True`` the values become the parameters: `after_load` cuts those.
        if not metadata.get("assign_to_params_buffers"):
            for name, param in module._parameters.items():
                value = states.get(prefix + name)
                if isinstance(param, DTensor) and _is_whole(value, param):
                    # (``load_state_dict`` has made a copy of the user's dictionary.)
                    states[prefix + name] = own_part(value, param)

    def after_load(self, *_: Any) -> None:
        registry.on.params_assigned(self.unit, True)
