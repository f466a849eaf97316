"""`compile_step`: forward, backward and all communication of a sharded model as one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch.fx import Graph
from torch.utils._pytree import tree_flatten

from ..api.module import FSDPModule
from ..comm.streams import Streams
from ..dtensor.from_local import local_of
from ..runtime.building import build_runtime
from ..runtime.runtime import Runtime, runtime_of
from ..runtime.states import State
from ..runtime.unit import Unit, unit_of
from ..sharding.bucket import Bucket
from ..sharding.param import shard_of
from .capture import Arguments, LossFunction, Outputs, capture
from .host_collectives import abandon
from .lending import StepTensors
from .schedule import schedule

Backend = Callable[..., Callable[..., Any]]


def compile_step(
    model: nn.Module, loss_fn: LossFunction, *, backend: str | Backend = "inductor"
) -> CompiledStep:
    """Compile forward, loss and backward of a sharded model as one graph.

    The step reads the same shards and adds to the same ``.grad`` as eager training. So optimizers,
    clipping and checkpoints need no change, and you can mix eager and compiled steps.

    Args:
        model: a model whose root is sharded by `fully_shard`.
        loss_fn: called as ``loss_fn(model, *args, **kwargs)``. Returns the loss, a tensor with one
            number, or a tuple (or other pytree) whose first tensor is the loss. It is traced once
            for each set of shapes. Values that it reads from Python objects are constants of the
            graph, and it changes Python objects only while it is traced.
        backend: the compiler of the graph: a name or a function, as for `torch.compile`. "inductor"
            makes kernels; "aot_eager" runs the operators of eager steps, for the same bits.

    Returns:
        The step. Called with the arguments of ``loss_fn`` after the model, it runs forward and
        backward, adds to ``.grad`` of the parameters, and returns what ``loss_fn`` returned,
        detached.

    Raises:
        TypeError: if ``model`` is not sharded.
        ValueError: if a unit has a setting that the graph does not support; see docs/graph.md.

    Example:
        >>> def loss_fn(model, tokens):
        ...     logits = model(tokens)[:, :-1]
        ...     return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        >>> step = compile_step(model, loss_fn, backend="aot_eager")
        >>> for tokens in loader:
        ...     loss = step(tokens)
        ...     optimizer.step()
        ...     optimizer.zero_grad()

    The idea of a step as one graph whose collectives are nodes is SimpleFSDP's (arXiv 2411.00284).
    """
    if not isinstance(model, FSDPModule):
        raise TypeError(
            f"compile_step needs a sharded model, but {type(model).__name__} is not: call "
            "fully_shard(model) after sharding its blocks"
        )
    return CompiledStep(model, loss_fn, backend)


class CompiledStep:
    """A compiled step: see `compile_step`."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, backend: str | Backend) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._backend_name = backend
        self._backend: Backend = lookup_backend(backend) if isinstance(backend, str) else backend
        self._modules: list[nn.Module] = []
        self._state: list[Any] = []
        self._tensors = StepTensors(model, ())
        self._graphs: dict[Any, tuple[Outputs, Callable[..., Any]]] = {}

    @property
    def num_graphs(self) -> int:
        """The number of captured graphs, one for each set of shapes, dtypes and other arguments."""
        return len(self._graphs)

    def reset(self) -> None:
        """Trace again at the next call. Call this after a change that the step cannot see.

        It sees changes of shapes, dtypes, arguments, ``train()`` and ``eval()``, frozen parameters
        and autocast, but not of module attributes and global variables.
        """
        self._graphs.clear()
        self._state = []  # units are checked again, too

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = Arguments(*tree_flatten((args, kwargs)))
        self._prepare()
        key = (arguments.spec, *map(_kind, arguments.leaves), *self._modes())
        if key not in self._graphs:
            self._graphs[key] = self._compile(arguments)
        outputs, run = self._graphs[key]
        num_results = len(outputs.results.tensors)
        with torch.no_grad():
            try:
                made = list(run(*self._tensors.inputs(), *arguments.tensors))
            except BaseException:
                abandon()
                raise
            results, grads = made[:num_results], made[num_results:]
            del made
            self._add_to_gradients(outputs, grads)
        return outputs.results.filled(results)

    def _prepare(self) -> None:
        """Bring the units to where a forward would begin."""
        unit = unit_of(self._model)
        runtime = build_runtime(self._model) if unit.runtime is None else runtime_of(unit)
        if runtime.root is not unit:
            raise RuntimeError(
                f"compile_step was made for '{unit.name}', which is now inside of a larger model "
                "that has run: make a step of that"
            )
        if not all(each.registration.is_current() for each in runtime.units):
            runtime = build_runtime(self._model)  # users have put other parameters there
        _begin(runtime)
        state = [(u.param_group.num_plans, u.param_group.freezing.trains) for u in runtime.units]
        if state != self._state or not self._tensors.are_current():
            for each in runtime.units:
                _check(each)
            self._state, self._tensors = state, StepTensors(self._model, runtime.units)
            self._modules = list(self._model.modules())
            self._graphs.clear()

    def _modes(self) -> list[Any]:
        device = unit_of(self._model).device.type
        modes: list[Any] = [module.training for module in self._modules]
        if torch.is_autocast_enabled(device):
            modes.append(torch.get_autocast_dtype(device))
        return modes

    def _compile(self, arguments: Arguments) -> tuple[Outputs, Callable[..., Any]]:
        tensors = self._tensors
        inputs = [tensor.detach() for tensor in (*tensors.inputs(), *arguments.tensors)]
        module, outputs = capture(self._model, self._loss_fn, tensors, arguments, inputs)
        if self._backend_name == "inductor" and unit_of(self._model).device.type == "cpu":
            _check_inductor(module.graph)
        numbers = {unit: i for i, unit in enumerate(tensors.units)}
        freed = {
            i: numbers[each.unit]
            for i, each in enumerate(tensors.buckets)
            if each.unit.reshard_after_forward is not False and each.bucket.mesh.num_shards > 1
        }
        schedule(module, freed)
        with torch.no_grad():
            return outputs, self._backend(module, inputs)

    def _add_to_gradients(self, outputs: Outputs, grads: list[Any]) -> None:
        tensors = self._tensors
        for k, (i, present) in enumerate(outputs.reduced):
            sums, grads[k] = grads[k], None  # its memory goes as soon as it is added
            _add(tensors.buckets[i].bucket, present, sums)
        for i, grad in zip(outputs.plain, grads[len(outputs.reduced) :], strict=True):
            param = tensors.plain[i][0]
            param.grad = grad.clone() if param.grad is None else param.grad.add_(grad)


def _begin(runtime: Runtime) -> None:
    """What a forward of the root does before it runs."""
    runtime.on.before_root_forward()
    if runtime.in_backward or runtime.schedule.root is not None:
        runtime.reset()
    runtime.on.root_forward_begins()
    runtime.release_gradients()
    for unit in runtime.units:
        _make_ready(unit, runtime.streams)


def _make_ready(unit: Unit, streams: Streams) -> None:
    """What a forward of ``unit`` does before it gathers.

    Raises:
        RuntimeError: if gradients are not to be reduced, or some were not; if parameters were
            replaced.
    """
    config, group = unit.config, unit.param_group
    if not config.reduce_grads or not config.all_reduce_grads:
        raise RuntimeError(
            f"compile_step reduces gradients in every step, but gradient sync of unit "
            f"'{unit.name}' is off. Call the step on each micro-batch with sync on: gradients "
            "are added to .grad"
        )
    if unit.gradients.holds_earlier or unit.gradients.holds_partial_sums:
        raise RuntimeError(
            f"Unit '{unit.name}' holds gradients that eager backwards without gradient sync "
            "have left: run the last micro-batch eagerly, with sync, before compile_step"
        )
    if unit.state is not State.SHARDED:
        unit.reshard(streams)
    if group.freezing.adopt():
        group.show_freezing()
    if group.dirty or not group.materialized:
        unit.plan_anew(streams)
    unit.registration.check()


def _check(unit: Unit) -> None:
    """
    Raises:
        ValueError: if the unit has a setting that a graph does not support.
    """
    config, options = unit.config, unit.config.comm_options
    settings = {
        "an offload policy": config.offload,
        "custom collectives": options.all_gather or options.reduce_scatter,
        "a CommPolicy": options.policy,
        "special memory for collectives": options.memory,
        "an all-reduce hook": config.all_reduce_hook,
        "reduce_scatter_unused_params": config.reduce_unused,
    }
    found = [name for name, value in settings.items() if value]
    if any(map(unit.gradients.follows_autograd, unit.buckets)):
        found.append("parameters whose grad_dtype is None")
    for param in unit.params:
        hooks = param.sharded._backward_hooks or param.sharded._post_accumulate_grad_hooks
        if hooks:
            found.append(f"hooks on the gradient of '{param.fqn}'")
        if param.extension or param.annotations is not None:
            found.append(f"a tensor subclass or annotations for '{param.fqn}'")
    if found:
        raise ValueError(
            f"compile_step does not capture unit '{unit.name}', which has {', '.join(found)}. "
            "Remove that, or train this model eagerly"
        )


def _check_inductor(graph: Graph) -> None:
    """
    Raises:
        ValueError: if a step on the CPU has functional collectives, as tensor parallelism has.
    """
    if any(getattr(node.target, "namespace", "") == "_c10d_functional" for node in graph.nodes):
        raise ValueError(
            "compile_step(backend='inductor') corrupts memory with torch 2.15 where a step on the "
            "CPU has functional collectives, as this one has for tensor parallelism "
            "(docs/graph.md): pass backend='aot_eager'"
        )


def _kind(leaf: Any) -> Any:
    """What a graph depends on of one argument."""
    if isinstance(leaf, Tensor):
        return type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return type(leaf), leaf


def _add(bucket: Bucket, present: Sequence[int], sums: Tensor) -> None:
    """Add reduced gradients to ``.grad`` of the parameters.

    Args:
        present: indices of the parameters that have one.
        sums: shape (shard_numel,), laid out as ``bucket.shards``.
    """
    params = bucket.params
    detached = [i for i in present if params[i].sharded.grad is None]
    store = bucket.gradient_store(detached)
    if len(detached) == len(params):
        store.flat.copy_(sums)
    elif len(present) == len(params) and all(
        params[i].sharded.grad is store.dtensors[i] for i in present
    ):
        store.flat.add_(sums)
    else:
        for i in present:
            own = shard_of(sums, bucket.layout.slots[i], bucket.rank)
            grad = params[i].sharded.grad
            if grad is None:
                store.locals[i].copy_(own)
            else:
                local_of(grad).add_(own)
    for i in detached:
        params[i].sharded.grad = store.dtensors[i]
