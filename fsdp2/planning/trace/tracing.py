"""Runs one step of a model on fake tensors and records its events.

The modules that may be units carry the hooks of real units (`hooks.UnitHooks`), so forward and
backward begin and end where they do in a sharded run: the same casts of inputs and outputs, the
same nodes in the graph. The hooks call a `_Recorder` instead of a runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException as _DataDependent
from torch._subclasses.fake_tensor import DynamicOutputShapeException as _DynamicShape
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from typing_extensions import override

from ...api.arguments import backward_reads_parameters
from ...common.garbage import no_full_collections
from ...common.pytree import map_tensors, tensors_in
from ...describe.bucket_bytes import stored_dtype_of
from ...dtensor.from_local import dtensor_over, local_of
from ...experts import PlannedRouting, planned_routing
from ...policy import (
    MixedPrecisionPolicy,
    compute_dtype,
    param_dtype_of,
    sum_dtype,
)
from ...runtime.events import TreeEvents
from ...runtime.hooks import UnitHooks
from ...runtime.unit import StepState
from ...runtime.unit_config import UnitConfig
from ...sharding.bucket import KEEPS_DTYPES
from ...wrap import parameters_of
from ..workload import LossFn
from . import events
from .attention import ContextParallel
from .checkpointing import checkpointed
from .compiled import Compiler
from .kernels import traced_kernels
from .meter import Awaited, StorageMeter
from .offloaded import CountedOffload, counted_offload
from .stage import StageOutputs, run_stage
from .trace_options import TraceOptions


def trace_step(options: TraceOptions, modules: Sequence[str]) -> events.StepTrace:
    """Trace forward, loss and backward of a model, and leave it unchanged.

    Args:
        options: with the model and its input. With ``fake``, their data is neither read nor
            written.
        modules: names of all modules that may be units; "" is the model.

    Raises:
        ValueError: if ``max_saved_bytes`` is negative, or given without ``fake``; if the model's
            shapes depend on data (with ``fake``), or nothing needs a gradient; for modules that
            cannot be compiled; with ``context``, if the model has no attention, or attention that
            torch cannot split.
        TypeError: for parameters that are tensor subclasses.
    """
    options.check(modules)
    workload, context, model = options.workload, options.context, options.workload.model
    trace = _empty_trace(modules, options)
    meter = StorageMeter(
        options.device_type,
        lambda *collective: recorder.collective(*collective),
        lambda number: recorder.wait(number),
        None if context is None else context.check,
    )
    recorder = _Recorder(trace, meter, workload.tensor_ranks, context)
    routing = PlannedRouting(workload.expert_ranks, recorder.exchange(workload.expert_ranks))
    with ExitStack() as stack:
        stack.enter_context(no_full_collections())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_without_side_effects(model))
        if workload.fake:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(_without_propagation(meter))
            kernels = traced_kernels(options.kernels, meter, trace.notes, context)
            stack.enter_context(kernels)
            stack.enter_context(planned_routing(routing))
        elif options.kernels.device != "cpu":
            trace.notes.append("Traced with fake=False: attention and norms use CPU kernels")
        arguments = _replace_and_watch(recorder, options)
        stack.callback(recorder.unwatch)
        _instrument(stack, recorder, options)
        stack.enter_context(meter)
        offload = counted_offload(model, options.saved_limit, meter, recorder.host_copy)
        try:
            run = partial(run_stage, model, arguments, options.stage)
            _run(run, workload.loss_fn or _default_loss, recorder, offload)
        except (_DataDependent, _DynamicShape) as error:
            raise ValueError(
                f"The shapes in this model depend on the values of its data ({error}), so they are "
                "not known without running it. Pass fake=False to run one step of it on the CPU"
            ) from error
    _conclude(trace, meter, routing, options)
    return trace


def _empty_trace(modules: Sequence[str], options: TraceOptions) -> events.StepTrace:
    by_name = dict(options.workload.model.named_modules())
    return events.StepTrace(
        modules=list(dict.fromkeys([*modules, ""])),
        module_order=list(by_name),
        embeddings=frozenset(n for n, m in by_name.items() if not backward_reads_parameters([m])),
        params=_describe_params(options),
    )


def _replace_and_watch(recorder: _Recorder, options: TraceOptions) -> tuple[tuple, dict]:
    """Put stand-ins in place of all tensors of the model, and watch the gradients of parameters.

    Returns:
        Stand-ins for the model's arguments.
    """
    trace, meter = recorder.trace, recorder.meter
    model, fake = options.workload.model, options.workload.fake
    sample = map_tensors(lambda t: _stand_in(t, fake), options.workload.sample_input)
    params = _replace_tensors(model, options.mp_policy, trace, fake)
    args, kwargs = _as_arguments(sample)
    inputs = list(tensors_in((args, kwargs))) if options.stage.is_first else []
    trace.input_bytes = sum(t.nbytes for t in inputs)
    for tensor in (*params, *model.buffers(), *inputs):
        meter.ignore(local_of(tensor))
    for param, i in params.items():
        if options.device_type == "cpu" and _keeps_grad_dtype(trace.params[i], options.mp_policy):
            param.grad_dtype = None
        if param.requires_grad:
            recorder.watch(param, i)
    return args, kwargs


def _instrument(stack: ExitStack, recorder: _Recorder, options: TraceOptions) -> None:
    """Compile and recompute modules as requested, and add hooks to modules that may be units."""
    by_name = dict(options.workload.model.named_modules())
    mode = options.workload.activation_checkpointing
    compiler = Compiler(recorder.meter, lambda: len(recorder.trace.events))
    for name in options.compiled:
        own = mode if name in options.checkpointed else "none"
        stack.enter_context(compiler.compiled(name, by_name[name], own))
    for name in options.checkpointed:
        if name not in options.compiled:
            stack.enter_context(checkpointed(by_name[name], mode, recorder.forward))
    for i, name in enumerate(recorder.trace.modules):
        unit = recorder.root = _TracedUnit(by_name[name], i, options.mp_policy)  # the last one
        unit.runtime = recorder
        recorder.units.append(unit)
        _RecordingHooks(cast(Any, unit)).install()


def _conclude(
    trace: events.StepTrace, meter: StorageMeter, routing: PlannedRouting, options: TraceOptions
) -> None:
    trace.nbytes, trace.uncosted = meter.nbytes, dict(meter.uncosted)
    if options.context is not None:
        if options.stage.is_first and options.stage.is_last:
            options.context.check_whole()
        trace.notes += options.context.conclude()
    if options.workload.fake and routing.num_exchanges:
        trace.notes.append("Tokens are taken to be spread evenly over experts (TokenExchange)")
    elif options.workload.expert_ranks > 1:
        raise ValueError(
            "The model makes no fsdp2.experts.TokenExchange, so it is not known which tokens "
            f"travel to the {options.workload.expert_ranks} ranks of its experts: make one in its "
            "forward, or pass expert_ranks=1"
        )


def _run(
    run: Callable[..., StageOutputs],
    loss_fn: LossFn,
    recorder: _Recorder,
    offload: AbstractContextManager[CountedOffload | None],
) -> None:
    trace, kept = recorder.trace, []
    recorder.meter.begin()
    with ExitStack() as forward:
        offloaded = forward.enter_context(offload)

        def loss_of(output: Any) -> torch.Tensor:
            loss = loss_fn(output)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ValueError(
                    "A step needs a loss of one element that depends on trained parameters, got "
                    f"{loss!r}: pass loss_fn, a function of the model's output"
                )
            kept.append(loss)  # as in a training step
            return loss

        def between() -> None:
            forward.close()
            recorder.flush()
            trace.events.append(events.StartOfBackward())
            recorder.in_backward = True

        def before_weights() -> None:
            recorder.flush()
            trace.events.append(events.StartOfWeights())

        sent = run(loss_of, between, before_weights)
        recorder.take_left()
        for unit in recorder.units:
            unit.step.input_nodes.clear()  # as `Runtime.free_units` does
    recorder.flush()
    trace.outputs, trace.sent_bytes, trace.returned_bytes = sent
    if offloaded is not None:
        trace.host_bytes = offloaded.bytes.host_peak


def _describe_params(options: TraceOptions) -> list[events.ParamInfo]:
    """The parameters of a model; only one rank's part of experts."""
    described = []
    mp_policy, expert_ranks = options.mp_policy, options.workload.expert_ranks
    prefixes = tuple(f"{name}." for name in options.experts)
    for name, param, owners in parameters_of(options.workload.model):
        shape, num_experts = tuple(local_of(param).shape), None
        if prefixes and name.startswith(prefixes) and shape:
            num_experts = shape[0]
            shape = (-(-num_experts // expert_ranks), *shape[1:])
        plain = type(param) in (nn.Parameter, torch.Tensor) or isinstance(param, DTensor)
        if not plain and not _is_fake(param):
            raise TypeError(
                f"Parameter '{name}' is a {type(param).__name__}; only plain parameters can be "
                "estimated"
            )
        embedding = len(owners) == 1 and type(next(iter(owners))) is nn.Embedding
        param_dtype = param_dtype_of(mp_policy, param)
        described.append(
            events.ParamInfo(
                name,
                shape,
                stored_dtype_of(mp_policy, param, param_dtype),
                param.requires_grad,
                embedding,
                param_dtype,
                num_experts,
                param.dtype,
            )
        )
    return described


def _keeps_grad_dtype(param: events.ParamInfo, mp_policy: MixedPrecisionPolicy) -> bool:
    """Whether runs reduce the gradient in the dtype autograd makes (`Bucket.keeps_dtypes`)."""
    computes = compute_dtype(param.dtype, param.param_dtype)
    sums = sum_dtype(param.dtype, mp_policy.reduce_dtype)
    return KEEPS_DTYPES and computes.itemsize < sums.itemsize


def _is_fake(param: torch.Tensor) -> bool:
    return isinstance(param, FakeTensor) or isinstance(param.data, FakeTensor)


# -- stand-ins -------------------------------------------------------------------------------


def _stand_in(tensor: torch.Tensor, fake: bool) -> torch.Tensor:
    if not fake:
        if tensor.is_meta:
            raise ValueError(
                "fake=False computes with values, but the sample input is on the meta device"
            )
        return tensor.detach().cpu().requires_grad_(tensor.requires_grad)
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


def _as_arguments(sample: Any) -> tuple[tuple, dict]:
    if isinstance(sample, dict):
        return (), sample
    return (tuple(sample) if isinstance(sample, tuple | list) else (sample,)), {}


def _replace_tensors(
    model: nn.Module, mp_policy: MixedPrecisionPolicy, trace: events.StepTrace, fake: bool
) -> dict[nn.Parameter, int]:
    """Replace the modules' parameters by stand-ins in the compute dtype, and their buffers.

    Returns:
        The number of each stand-in parameter in the trace.
    """
    made: dict[int, nn.Parameter] = {}
    numbers: dict[nn.Parameter, int] = {}
    for i, (_, param, owners) in enumerate(list(parameters_of(model))):
        dtype = compute_dtype(param.dtype, param_dtype_of(mp_policy, param))
        if fake or param.is_meta:
            data = torch.empty(trace.params[i].shape, dtype=dtype, device="cpu")
            if isinstance(param, DTensor):
                data = dtensor_over(
                    data, param.device_mesh, param.placements, param.shape, param.stride()
                )
        else:
            data = param.detach().to("cpu", dtype, copy=True)
        stand_in = nn.Parameter(data, requires_grad=param.requires_grad)
        made[id(param)] = stand_in
        numbers[stand_in] = i
        for owner in owners:
            for name, own in owner._parameters.items():
                if own is param:
                    owner._parameters[name] = stand_in
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                trace.buffer_bytes += buffer.nbytes
                empty = fake or buffer.is_meta
                module._buffers[name] = (
                    torch.empty_like(buffer, device="cpu")
                    if empty
                    else buffer.detach().to("cpu", copy=True)
                )
    return numbers


@contextmanager
def _without_side_effects(model: nn.Module) -> Iterator[None]:
    """Restore the modules' attributes, parameters, buffers and hooks at the end.

    State that a model keeps elsewhere (the cache of a function) is not restored.
    """
    kept = []
    for module in model.modules():
        values = vars(module)
        kept.append((values, dict(values)))
        kept += [(held, held.copy()) for held in values.values() if isinstance(held, dict)]
    try:
        yield
    finally:
        for holder, before in kept:
            holder.clear()
            holder.update(before)


@contextmanager
def _without_propagation(meter: StorageMeter) -> Iterator[None]:
    """Leave out the operators that DTensor runs on whole shapes to find the shapes of results."""
    propagator: Any = ShardingPropagator
    real = propagator._propagate_tensor_meta_non_cached

    def uncounted(*args: Any, **kwargs: Any) -> Any:
        with meter.paused():
            return real(*args, **kwargs)

    propagator._propagate_tensor_meta_non_cached = uncounted
    try:
        yield
    finally:
        propagator._propagate_tensor_meta_non_cached = real


def _default_loss(output: Any) -> torch.Tensor:
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    if isinstance(output, torch.Tensor) and output.numel() == 1:
        return output
    total: torch.Tensor | None = None
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            term = tensor.sum()
            total = term if total is None else total + term
    if total is None:
        raise ValueError("No output of the model needs a gradient: is every parameter frozen?")
    return total


# -- recording -------------------------------------------------------------------------------


class _TracedUnit:
    """The attributes of a unit that `UnitHooks` uses."""

    def __init__(self, module: nn.Module, number: int, mp_policy: MixedPrecisionPolicy) -> None:
        self.modules = (module,)
        self.number = number
        self.config = UnitConfig(mp_policy)
        self.device = torch.device("cpu")
        self.step = StepState()
        self.runtime: Any = None
        self.param_group = SimpleNamespace(num_plans=1)  # (never planned anew)


class _Recorder:
    """Takes the place of a runtime and records the calls to it."""

    backward = "the only one"
    on = TreeEvents(())

    def __init__(
        self,
        trace: events.StepTrace,
        meter: StorageMeter,
        tensor_ranks: int,
        context: ContextParallel | None,
    ) -> None:
        self.trace = trace
        self.meter = meter
        self._tensor_ranks = tensor_ranks
        self._context = context
        self._num_awaited = 0
        self._watched: dict[nn.Parameter, Callable[[torch.Tensor], None]] = {}
        self.root: Any = None
        self.units: list[_TracedUnit] = []
        self.in_backward = False
        self._num_recomputed = 0
        self._recomputed_from: int | None = None  # while backward repeats a forward

    def unwatch(self) -> None:
        """Release the parameters: their hooks refer to this object, which the garbage collector
        does not see."""
        self._watched.clear()

    def flush(self) -> None:
        """Record the computation since the last event."""
        if self._recomputed_from is not None:
            self._num_recomputed += self.meter.num_operations - self._recomputed_from
            self._recomputed_from = 0
        number, self._num_recomputed = self._num_recomputed, 0
        done = self.meter.take()
        if done is not None:
            self.trace.events.append(replace(done, num_recomputed=number) if number else done)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context of a forward that may be a repeated one."""
        if not self.in_backward or self._recomputed_from is not None:
            yield
            return
        self._recomputed_from = self.meter.num_operations
        try:
            yield
        finally:
            self._num_recomputed += self.meter.num_operations - self._recomputed_from
            self._recomputed_from = None

    def _call(self, kind: events.CallKind, unit: Any, flag: bool = False) -> None:
        self.flush()
        self.trace.events.append(events.Call(kind, unit.number, flag))

    def pre_forward(self, unit: Any, module: nn.Module | None = None) -> None:
        pass  # recorded by `entered`, which knows the inputs

    def entered(self, unit: Any, marked: bool) -> None:
        self._call(events.CallKind.ENTER, unit, marked)

    def post_forward(self, unit: Any, *, differentiable: bool, forward: Any) -> None:
        self._call(events.CallKind.LEAVE, unit, differentiable)

    def pre_backward(self, unit: Any) -> None:
        self._call(events.CallKind.BACKWARD_ENTER, unit)

    def post_backward(self, unit: Any) -> None:
        unit.step.input_nodes.clear()  # as `Runtime.post_backward` does
        self._call(events.CallKind.BACKWARD_LEAVE, unit)

    def exchange(self, ranks: int) -> Callable[[int], None]:
        """A function that records the exchange of tokens with this number of bytes."""

        def record(nbytes: int) -> None:
            self.flush()
            self.trace.events.append(events.ModelExchange(nbytes, ranks))

        return record

    def host_copy(self, event: events.HostCopy | events.CopyEnd) -> None:
        """Record a copy of an offloaded activation, or that compute waits for one."""
        self.flush()
        self.trace.events.append(event)

    def collective(self, kind: str, nbytes: int, group: str) -> Awaited:
        """Record a collective of tensor or of context parallelism.

        Compute waits for collectives of DTensors at once; for others of tensor parallelism, where
        the model calls ``wait_tensor``; and for context parallelism, when the result is read.
        """
        self.flush()
        number = self._num_awaited
        self._num_awaited += 1
        shares = self._context is not None and group == self._context.group
        ranks = self._context.ranks if self._context and shares else self._tensor_ranks
        name = "context" if shares else "tensor"
        self.trace.events.append(events.ModelExchange(nbytes, ranks, kind, name, number))
        return Awaited(number, at_use=shares)

    def wait(self, number: int) -> None:
        """Record that compute waits for a collective."""
        self.flush()
        self.trace.events.append(events.ExchangeEnd(number))

    def watch(self, param: nn.Parameter, number: int) -> None:
        """Record the gradient of a parameter, when it comes."""
        hook = self._watched[param] = self.gradient_of(number)
        param.register_post_accumulate_grad_hook(hook)

    def take_left(self) -> None:
        """Record gradients that were assigned without calling a hook: gradients of weights in a
        split backward."""
        for param, hook in self._watched.items():
            if param.grad is not None:
                hook(param)

    def gradient_of(self, number: int) -> Callable[[torch.Tensor], None]:
        """A hook that records the gradient of a parameter and removes it."""

        def hook(param: torch.Tensor) -> None:
            assert param.grad is not None
            self.flush()
            local = local_of(param.grad)
            storage, dtype = self.meter.number_of(local.untyped_storage()), local.dtype
            nbytes = self.meter.ignore(local)
            self.trace.events.append(events.Gradient(number, nbytes, dtype, storage))
            param.grad = None
            self.meter.begin()

        return hook


class _RecordingHooks(UnitHooks):
    """The hooks of a unit, which also report whether an input needs a gradient."""

    marks_all = True

    @override
    def _enter_backward(self, forward: Any) -> None:
        unit: Any = self.unit
        unit.runtime.pre_backward(unit)

    @override
    def pre_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        needs = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in((args, kwargs)))
        unit: Any = self.unit
        unit.runtime.entered(unit, needs)
        return super().pre_forward(module, args, kwargs)

    @override
    def _has_views(self, tensor: torch.Tensor) -> bool:
        # Marked as in a run: it may be changed in place.
        return type(tensor) is FakeTensor or super()._has_views(tensor)

    @override
    def _watch_accumulation(self) -> None:
        pass  # the replay finds it in the flag of ENTER
