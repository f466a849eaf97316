"""`torch.compile` of modules, in a step that is traced on fake tensors.

The forward of a module becomes the two graphs that TorchInductor would get: AOTAutograd traces them
with TorchInductor's decompositions, and its min-cut partitioner decides which tensors are saved for
backward, as in a run. No code is generated. A graph runs kernel by kernel (`fusion`): of fused ones
only the results have memory; all others run as in a step without a compiler.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

from ...common.suggestions import did_you_mean
from .checkpointing import Selective
from .events import Operation
from .fusion import Kernel, home_of, kernels_of, values_of
from .meter import StorageMeter

FUSED = "inductor::fused"
_RNG_STATE_BYTES = 5056  # of the CPU; of CUDA fewer
# Of the attributes of ``nn.Module`` itself, only ``training`` affects a forward.
_INTERNAL = frozenset(vars(nn.Module())) - {"training"} | {"forward"}
_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)


class Compiler:
    """Compiles modules of one model; modules that do the same are traced once.

    Args:
        meter: counts what the kernels allocate and cost.
        num_events: how many events the trace has so far: a compiled module may make none.
    """

    def __init__(self, meter: StorageMeter, num_events: Callable[[], int]) -> None:
        self._meter, self._num_events = meter, num_events
        self._made: dict[Any, Callable[..., Any]] = {}
        self._kept: list[Any] = []  # objects whose ids are in keys

    @contextmanager
    def compiled(self, name: str, module: nn.Module, checkpointing: str) -> Iterator[None]:
        """Context in which ``module`` is compiled.

        Args:
            name: of the module.
            checkpointing: "none", "full" or "selective": how it would be checkpointed.
        """
        call = _Call(module)

        def run(*args: Any, **kwargs: Any) -> Any:
            return self._run(call, name, checkpointing, args, kwargs)

        module.forward = run
        try:
            yield
        finally:
            del module.forward

    def _run(self, call: _Call, name: str, checkpointing: str, args: tuple, kwargs: dict) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        own = [store[key] for store, key in call.places]
        rest = [leaf if not isinstance(leaf, torch.Tensor) else torch.Tensor for leaf in leaves]
        key = (
            checkpointing,
            self._structure(call.module),
            self._plain(rest),
            str(spec),
            [_described(tensor) for tensor in (*own, *given)],
            _aliases((*own, *given)),
            (torch.is_grad_enabled(), torch.is_autocast_enabled("cuda")),
        )
        made = self._made.get(str(key))
        if made is None:
            made = self._traced(call.on(leaves, spec), checkpointing)
            # The first call traces; its result is not used.
            hooks = torch.autograd.graph.saved_tensors_hooks(_same, _same)
            before = self._num_events()
            try:
                with self._meter.paused(), hooks, _no_checkpoints():
                    made(*own, *given)
                if self._num_events() != before:
                    raise ValueError("tokens are exchanged in it")
            except Exception as error:
                raise ValueError(
                    f"Module '{name}' cannot be traced as one graph, as torch.compile(fullgraph="
                    f"True) would: {type(error).__name__}: {error}. Name the modules that can in "
                    "compiled="
                ) from error
            self._made[str(key)] = made
        return made(*own, *given)

    def _traced(self, call: Callable[..., Any], checkpointing: str) -> Callable[..., Any]:
        from functorch.compile import aot_function
        from torch._inductor.decomposition import select_decomp_table

        def compile_graph(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return Program(graph, self._meter)

        return aot_function(
            call,
            compile_graph,
            compile_graph,
            partition_fn=_partition(checkpointing),
            decompositions=select_decomp_table(),
        )

    def _structure(self, module: nn.Module) -> Any:
        """The attributes that determine a forward."""
        found = []
        for name, inner in module.named_modules(remove_duplicate=False):
            own = {k: self._plain(v) for k, v in vars(inner).items() if k not in _INTERNAL}
            hooks = []
            if inner is not module:
                hooks = [*inner._forward_pre_hooks.values(), *inner._forward_hooks.values()]
            found.append((name, id(type(inner)), sorted(own.items()), self._plain(hooks)))
        return found

    def _plain(self, value: Any) -> Any:
        """A value as part of a key: itself, or the identity of an object."""
        if isinstance(value, _PLAIN):
            return (type(value).__name__, repr(value))
        if type(value) in (tuple, list):
            return [self._plain(each) for each in value]
        self._kept.append(value)
        return id(value)


def check_compiled(
    names: Sequence[str],
    modules: Mapping[str, nn.Module],
    units: Sequence[str],
    checkpoint_modules: Sequence[str],
) -> None:
    """Check the names of modules to compile.

    Args:
        modules: of the model, by name.
        units: names of the modules that may be units.
        checkpoint_modules: names of the modules that may be checkpointed.

    Raises:
        ValueError: for an unknown name, and for a module that contains a unit, a checkpointed
            module or another compiled one: their hooks would be in the middle of its graph.
    """
    for name in names:
        if name not in modules:
            raise ValueError(
                f"compiled: the model has no module '{name}'{did_you_mean(name, modules)}"
            )
        prefix = f"{name}." if name else ""
        for what, others in (
            ("unit", units),
            ("checkpointed module", checkpoint_modules),
            ("compiled module", names),
        ):
            for other in others:
                if other != name and other.startswith(prefix):
                    raise ValueError(
                        f"compiled: module '{name}' has the {what} '{other}' in it, so it is not "
                        "one graph: compile the inner modules"
                    )


class _Call:
    """The forward of a module as a function of its parameters, buffers and arguments.

    Attributes:
        places: where parameters and buffers are.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._forward = module.forward
        self.places: list[tuple[dict[str, Any], str]] = []
        for inner in module.modules():
            for store in (cast(Any, inner._parameters), cast(Any, inner._buffers)):
                self.places += [(store, key) for key, value in store.items() if value is not None]

    def on(self, leaves: Sequence[Any], spec: Any) -> Callable[..., Any]:
        """A function of tensors alone, for arguments like these."""

        def call(*tensors: torch.Tensor) -> Any:
            fresh = iter(tensors[len(self.places) :])
            now = [next(fresh) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(now, spec)
            with self._replaced(tensors):
                return self._forward(*args, **kwargs)

        return call

    @contextmanager
    def _replaced(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        before = [store[key] for store, key in self.places]
        for (store, key), tensor in zip(self.places, tensors, strict=False):
            store[key] = tensor
        try:
            yield
        finally:
            for (store, key), tensor in zip(self.places, before, strict=True):
                store[key] = tensor


def _described(tensor: torch.Tensor) -> Any:
    return (tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.requires_grad)


def _aliases(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Which of the tensors are the same, as the number of the first."""
    first: dict[int, int] = {}
    return [first.setdefault(id(tensor), i) for i, tensor in enumerate(tensors)]


@contextmanager
def _no_checkpoints() -> Iterator[None]:
    """Context in which activation checkpointing is an error: a graph would be traced without it."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "it checkpoints a part of itself; what activation_checkpointing= does is known"
        )

    module: Any = torch.utils.checkpoint
    with ExitStack() as stack:
        for name, instead in (
            ("_checkpoint_without_reentrant_generator", refuse),
            ("_checkpoint_without_reentrant_generator_impl", refuse),  # since torch 2.15
            ("CheckpointFunction", SimpleNamespace(apply=refuse)),
        ):
            if hasattr(module, name):
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, instead)
        yield


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _partition(checkpointing: str) -> Callable[..., Any]:
    """The min-cut partitioner, told what activation checkpointing does."""
    from functorch.compile import min_cut_rematerialization_partition

    def partition(joint: GraphModule, inputs: Any, **options: Any) -> Any:
        if checkpointing != "none":
            _tag(joint.graph, checkpointing)
        return min_cut_rematerialization_partition(joint, inputs, **options)

    return partition


def _tag(joint: Graph, checkpointing: str) -> None:
    """Mark each operator of forward with checkpointing's decision, as torch.compile does."""
    selective = Selective()
    for node in joint.nodes:
        if node.op != "call_function" or node.meta.get("partitioner_tag") == "is_backward":
            continue
        policy = CheckpointPolicy.PREFER_RECOMPUTE
        if checkpointing == "selective":
            policy = selective.policy_of(node.target)
            if node.target is operator.getitem:  # one of several results of an operator
                policy = node.all_input_nodes[0].meta.get("recompute", policy)
        node.meta |= {"recompute": policy, "ac_graph_id": 0}


class Program:
    """A graph that runs kernel by kernel on fake tensors.

    Args:
        graph: without autograd, of aten operators.
        meter: counts what it allocates, and its kernels.
    """

    _boxed_call = True  # so that inputs are freed when nothing needs them any more

    def __init__(self, graph: GraphModule, meter: StorageMeter) -> None:
        self._meter = meter
        self._inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
        self._constants = {
            n: getattr(graph, n.target) for n in graph.graph.nodes if n.op == "get_attr"
        }
        [output] = [n for n in graph.graph.nodes if n.op == "output"]
        self._outputs = output.args[0]
        self.kernels = kernels_of(graph.graph)
        self._dying, self._reused = _lives(self.kernels, self._inputs, output)

    def __call__(self, args: list[Any]) -> list[Any]:
        values = dict(zip(self._inputs, args, strict=True)) | self._constants
        args.clear()
        _drop(values, self._dying[0])
        steps = zip(self.kernels, self._dying[1:], self._reused, strict=True)
        for kernel, dying, reused in steps:
            if kernel.fused:
                self._run_fused(kernel, values, reused)
            else:
                for node in kernel.nodes:
                    values[node] = _call(node, values)
            _drop(values, dying)
        return [values[n] if isinstance(n, Node) else n for n in self._outputs]

    def _run_fused(self, kernel: Kernel, values: dict[Node, Any], reused: list[Node]) -> None:
        # A result reuses their memory, so it is freed before the result is allocated.
        _drop(values, reused)
        for node in kernel.nodes:
            if node in kernel.made:
                [like] = values_of(node)
                values[node] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
            elif home_of(node) is not node and home_of(node) in values:
                values[node] = _call(node, values)
        self._meter.count(Operation(0, kernel.nbytes, kernel.dtype, False, FUSED))


def _call(node: Node, values: dict[Node, Any]) -> Any:
    target: Any = node.target
    given: Any = (node.args, node.kwargs)
    args, kwargs = cast(Any, map_arg(given, values.__getitem__))
    # The wrappers of recomputed random operators; in older torch, of all attention.
    wrapper = target.name() if isinstance(target, HigherOrderOperator) else ""
    if wrapper == "run_with_rng_state":
        return args[1](*args[2:], **kwargs)
    if wrapper == "run_and_save_rng_state":
        state = torch.empty(_RNG_STATE_BYTES, dtype=torch.uint8)
        return state, args[0](*args[1:], **kwargs)
    return target(*args, **kwargs)


def _drop(values: dict[Node, Any], nodes: Sequence[Node]) -> None:
    for node in nodes:
        values.pop(node, None)


def _lives(
    kernels: Sequence[Kernel], inputs: Sequence[Node], output: Node
) -> tuple[list[list[Node]], list[list[Node]]]:
    """The nodes that nothing needs any more, at the beginning and after each kernel; and for each
    kernel, the nodes whose memory a result reuses."""
    last: dict[Node, int] = dict.fromkeys(inputs, 0)
    for i, kernel in enumerate(kernels, 1):
        last |= dict.fromkeys((*kernel.nodes, *kernel.reads), i)
    never = len(kernels) + 1
    last |= dict.fromkeys(output.all_input_nodes, never)
    of_memory: dict[Node, list[Node]] = {}
    for node in last:
        of_memory.setdefault(home_of(node), []).append(node)
    dying: list[list[Node]] = [[] for _ in range(never + 1)]
    for node, i in last.items():
        dying[i].append(node)
    reused: list[list[Node]] = []
    for i, kernel in enumerate(kernels, 1):
        free: dict[int, list[Node]] = {}
        if kernel.fused:
            for home in {home_of(node): None for node in dying[i]}:
                ends = max(last[node] for node in of_memory[home]) == i
                if ends and home not in kernel.nodes and values_of(home):
                    free.setdefault(values_of(home)[0].nbytes, []).append(home)
        taken = [
            same.pop() for node in kernel.made if (same := free.get(values_of(node)[0].nbytes))
        ]
        reused.append([node for home in taken for node in of_memory[home]])
    return dying[:never], reused
