"""Forwards and backwards of random programs: the steps of a training, and all others."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fsdp2
from fsdp2 import FSDPModule
from fsdp2.features.gather_budget import GatherBudgetError
from fsdp2.runtime.unit import units_in
from program_pair import Operation, Pair, has_one_mesh
from random_models import HOOK_FAULTS, PlannedError, add_faulty_hook, nodes, tensor_of
from reference import (
    assert_same,
    assert_same_parameters,
    assert_sharded,
    average_gradients,
    whole,
)

# How a backward that is not the last one of a step leaves its gradients.
MODES = ("reduce", "skip", "no_sync", "sharded", "shards only", "not last")


class Backwards(Pair):
    """What goes through a graph. None but the steps leaves gradients."""

    # -- steps -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def mode(self, mode: str) -> Iterator[None]:
        """Context in which backwards leave gradients in one of `MODES`."""
        model = self.model
        assert isinstance(model, FSDPModule)
        context: Any = model.no_sync() if mode == "no_sync" else contextlib.nullcontext()
        if mode == "sharded":
            model.set_accumulate_sharded(True)
        if mode in ("skip", "sharded"):
            model.set_requires_gradient_sync(False)
        if mode == "shards only":
            model.set_requires_all_reduce(False)
        if mode == "not last":
            model.set_is_last_backward(False)
        try:
            with context:
                yield
        finally:
            model.set_accumulate_sharded(False)
            model.set_requires_gradient_sync(True)
            model.set_is_last_backward(True)

    def micro(self, mode: str) -> None:
        """A micro-batch before the last one of a step."""
        with self.mode(mode):
            self.backward(*self.forward(*self.batch()))
        if mode == "reduce" and self.had_backward:
            self.after_backward()

    def step(self, *micro: str, clip: bool = False, to_none: bool = True) -> None:
        """Micro-batches with or without a reduction, the last with; then the optimizer."""
        for mode in micro:
            self.micro(mode)
        losses = self.forward(*self.batch())
        self.backward(*losses)
        if micro and not losses[0].requires_grad:
            self.zero()  # without a backward nothing reduces what micro-batches have left
        self.after_backward()
        if clip:
            with self.sharded_shown():
                norms = [fsdp2.clip_grad_norm_(each.parameters(), 0.1) for each in self.both()]
            assert_same(whole(norms[1]), whole(norms[0]), "norm")
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=to_none)
        with self.sharded_shown():
            assert_same_parameters(self.model, self.plain)

    def step_with(self, clip: bool, to_none: bool) -> None:
        self.step("reduce", clip=clip, to_none=to_none)

    def finalized(self, async_op: bool, *modes: str) -> None:
        """An iteration that the program ends by itself."""
        model = self.model
        assert isinstance(model, FSDPModule)
        self.free()
        model.reset_iter_state()  # of a backward that has raised, the mode could not change
        self.plain.zero_grad()
        model.set_manual_backward_finalization(True)
        had_backward = False
        for mode in modes:
            with self.mode(mode):
                self.backward(*self.forward(*self.batch()))
            had_backward |= self.had_backward
        self.had_backward = had_backward
        handle = model.finalize_backward(async_op=async_op)
        if handle is not None:
            handle.wait()
        self.after_backward()
        model.set_manual_backward_finalization(False)
        self.zero()

    def stepped_in_backward(self) -> None:
        """Each parameter is stepped, and its gradient dropped, as soon as it is there."""
        layers = [node.layer for node in (*nodes(self.plain), self.plain)]
        if any(layer.repeats > 1 or layer.recomputed or "same" in layer.kind for layer in layers):
            return  # later parts of the backward would see the new weights

        def step(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter -= 0.02 * parameter.grad
            parameter.grad = None

        step_now = torch.no_grad()(step)
        handles = []
        with self.sharded_shown():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    handles.append(parameter.register_post_accumulate_grad_hook(step_now))
        self.backward(*self.forward(*self.batch()))
        average_gradients(self.plain)
        for parameter in self.plain.parameters():
            if parameter.grad is not None:
                step_now(parameter)
        for handle in handles:
            handle.remove()
        with self.sharded_shown():
            assert_same_parameters(self.model, self.plain)
            assert all(parameter.grad is None for parameter in self.model.parameters())

    # -- several forwards or backwards -------------------------------------------------------

    def forwards(self, num: int, order: str) -> None:
        """Several forwards, then their backwards: as one, in turn or in reverse."""
        losses = [self.forward(*self.batch()) for _ in range(num)]
        if order == "sum":
            losses = [tuple(torch.stack(mine).sum() for mine in zip(*losses, strict=True))]
        for pair in losses if order == "in turn" else losses[::-1]:
            self.backward(*pair)
        self.after_backward()
        self.zero()

    def twice(self, *modes: str) -> None:
        """Two backwards of one graph, the first perhaps in another mode."""
        if self.recomputes("selective"):
            return
        losses = self.forward(*self.batch())
        if losses[0].requires_grad:
            with self.mode(modes[0]) if modes else contextlib.nullcontext():
                for loss in losses:
                    loss.backward(retain_graph=True)
        self.backward(*losses)
        self.after_backward()
        self.zero()

    def graph(self, *modes: str) -> None:
        """A backward that makes a graph of its own, and one after it."""
        if self.recomputes("selective"):
            return
        losses = self.forward(*self.batch())
        self.had_backward = losses[0].requires_grad
        if self.had_backward:
            for loss in losses:
                loss.backward(create_graph=True)
            for parameter in self.plain.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.detach()
            self.after_backward()
            if "again" not in modes:
                losses = self.forward(*self.batch())
            self.backward(*losses)
        self.after_backward()
        self.zero()

    def penalty(self, alone: bool) -> None:
        """The gradient of the input in the loss."""
        if self.recomputes("reentrant", "selective"):
            return
        x, step = self.batch()
        losses = []
        for each in self.both():
            mine = x.clone().requires_grad_()
            y = each(mine, step)
            (grad,) = torch.autograd.grad(y.square().sum(), mine, create_graph=True)
            losses.append(grad.square().mean() + (0 if alone else (y - 1).square().mean()))
        assert_same(losses[1], losses[0], "loss with a penalty")
        self.backward(*losses)
        average_gradients(self.plain)
        with self.sharded_shown():
            for mine, theirs in zip(self.model.parameters(), self.plain.parameters(), strict=True):
                if (mine.grad is None) != (theirs.grad is None):  # the derivative is zero
                    for parameter in (mine, theirs):
                        if parameter.grad is None:
                            parameter.grad = torch.zeros_like(parameter)
        self.had_backward = True
        self.after_backward()
        self.zero()

    def partial(self, number: int) -> None:
        """A loss of what a unit in the middle returns."""
        with self.outputs_of(number) as seen:
            self.forward(*self.batch())
        if seen[0]:
            self.backward(*(outputs[-1].square().mean() for outputs in seen))
            self.after_backward()
        self.zero()

    def inner(self, first: int, second: int, output: str) -> None:
        """Losses of what units in the middle return, one by one.

        Args:
            output: what becomes of the model's: "dropped", "kept" on one rank, or "used" before.
        """
        if self.recomputes("reentrant", "selective") or self.changes_in_place():
            return  # torch goes through such graphs once
        with self.outputs_of(first) as seen, self.outputs_of(second) as also:
            losses: Any = self.forward(*self.batch())
        found = [(a, b) for a, b in zip(*seen, strict=True) if a.requires_grad]
        found += [(a, b) for a, b in zip(*also, strict=True) if a.requires_grad]
        if output == "used" and losses[0].requires_grad and found:
            for loss in losses:
                loss.backward(retain_graph=True)
        if output == "dropped" or dist.get_rank():
            del losses
        for outputs in found:
            for each in outputs:
                each.square().mean().backward(retain_graph=True)
        self.had_backward = bool(found)
        self.after_backward()
        self.zero()

    @contextlib.contextmanager
    def outputs_of(self, number: int) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Yields what a unit of both returns inside; nothing if torch refuses a loss of that."""
        seen: tuple[list[Tensor], list[Tensor]] = ([], [])
        chosen = self.node(number, units=True)[0]
        around = [n for n in (*nodes(self.plain), self.plain) if chosen in [*n.modules()][1:]]
        if any(node.layer.recomputed for node in around):
            # To recompute, backward would enter a unit in the middle, whose output the loss does
            # not depend on.
            yield seen
            return
        handles = [
            node.register_forward_hook(lambda _m, _a, out, into=into: into.append(tensor_of(out)))
            for node, into in zip(self.node(number, units=True), seen, strict=True)
        ]
        yield seen
        for handle in handles:
            handle.remove()
        assert len(seen[0]) == len(seen[1])

    def inputs(self) -> None:
        """Gradients of the input, alone."""
        if self.recomputes("reentrant"):
            return
        self.zero()
        x, step = self.batch()
        found = []
        for each in self.both():
            mine = x.clone().requires_grad_()
            (grad,) = torch.autograd.grad((each(mine, step) - 1).square().mean(), mine)
            found.append(grad)
        assert_same(found[1], found[0], "gradient of the input")
        assert all(p.grad is None for p in self.model.parameters())

    def saved(self, how: str) -> None:
        """What autograd saves, weights included, goes through hooks of the user's."""
        contexts: dict[str, Any] = {
            "identity": torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
            "copies": torch.autograd.graph.saved_tensors_hooks(
                lambda x: x.detach().clone(), lambda x: x
            ),
            "on cpu": torch.autograd.graph.save_on_cpu(),
            "budget": fsdp2.offload_activations(self.model),
        }
        with contexts[how]:
            losses = self.forward(*self.batch())
        self.backward(*losses)
        self.after_backward()
        self.zero()

    def watched(self, number: int) -> None:
        """Hooks of the user's on a module: its output is another, and gradients are seen."""
        pair = self.node(number)
        if self.changes_in_place():
            return
        seen: list[list[Tensor | None]] = [[], []]
        handles = []
        for node, mine in zip(pair, seen, strict=True):
            if node.layer.passes == "tensor":
                handles.append(node.register_forward_hook(lambda _m, _a, out: out * 0.5))
            handles.append(
                node.register_full_backward_hook(
                    lambda _m, grads_in, grads_out, mine=mine: mine.extend((*grads_in, *grads_out))
                )
            )
        self.backward(*self.forward(*self.batch()))
        self.after_backward()
        for handle in handles:
            handle.remove()
        assert len(seen[0]) == len(seen[1])
        for expected, found in zip(*seen, strict=True):
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                # Inside, mixed precision has another dtype.
                assert_same(found.to(expected.dtype), expected, "gradient that a hook saw")
        self.zero()

    def compiled(self, number: int, what: str, backend: str) -> None:
        """The model, a module inside or its own layer is compiled for two steps."""
        if self.recomputes("reentrant"):
            return  # compiled, its outputs need gradients where plain ones do not
        kinds = {node.layer.kind for node in nodes(self.plain)}
        if "batchnorm" in kinds and self.recomputes(True, "reentrant", "selective"):
            return  # torch refuses what its compiler saves there: a buffer that has changed since
        module = {"model": self.model, "module": self.node(number)[1]}.get(what)
        module = self.node(number)[1].own if module is None else module
        module.compile(backend=backend)
        try:
            for _ in range(2):  # the second one skips other layers
                self.step("reduce")
        finally:
            module._compiled_call_impl = None
            torch._dynamo.reset()

    def alone(self, number: int, method: str) -> None:
        """A module in the middle is called by itself."""
        pair = self.node(number, units=True)
        inside = [node.own for node in (*nodes(pair[0]), pair[0])]
        everywhere = [node.own for node in (*nodes(self.plain), self.plain)]
        weights = [id(getattr(own, "weight", own)) for own in everywhere]
        if any(weights.count(id(getattr(own, "weight", own))) > 1 for own in inside):
            return  # they may belong to a unit around this module, and such calls are refused
        x, step = self.batch()
        if method == "encode" and isinstance(pair[1], FSDPModule):
            fsdp2.register_fsdp_forward_method(pair[1], "encode")
        call = "__call__" if method == "forward" else method
        # (In fp64: a unit inside of the model returns what it computes in.)
        outputs = [tensor_of(getattr(each, call)(x.clone(), step)) for each in pair]
        losses = [output.double().square().mean() for output in outputs]
        assert_same(losses[1], losses[0], "loss of a module alone")
        self.backward(*losses)
        self.after_backward()
        self.zero()

    def changes_in_place(self) -> bool:
        """Whether a layer does: torch refuses that beside full backward hooks of modules."""
        return any(node.layer.writes for node in nodes(self.plain))

    def recomputes(self, *ways: str) -> bool:
        """Whether a layer does, in one of these ways.

        torch refuses `torch.autograd.grad` of what is recomputed by "reentrant" checkpoints, and a
        second backward of "selective" ones.
        """
        layers = [node.layer for node in (*nodes(self.plain), self.plain)]
        return any(layer.recomputed in ways for layer in layers)

    # -- forwards without a backward ---------------------------------------------------------

    def evaluate(self, mode: str) -> None:
        """A forward without gradients."""
        context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
        for each in self.both():
            each.eval()
        with context[mode]() if mode in context else contextlib.nullcontext():
            self.forward(*self.batch())
        for each in self.both():
            each.train()

    def drop(self) -> None:
        """A forward whose output nobody uses."""
        self.forward(*self.batch())

    # -- what is done to gradients -----------------------------------------------------------

    def hooked(self) -> None:
        """Hooks of the user's on parameters: one changes gradients, one is told of them."""
        told: tuple[set[str], set[str]] = (set(), set())
        handles = []
        with self.sharded_shown():
            for seen, each in zip(told, self.both(), strict=True):
                for name, parameter in each.named_parameters():
                    if parameter.requires_grad:
                        note = functools.partial(lambda names, name, _: names.add(name), seen, name)
                        handles.append(parameter.register_hook(lambda grad: grad * 0.5))
                        handles.append(parameter.register_post_accumulate_grad_hook(note))
        self.backward(*self.forward(*self.batch()))
        self.after_backward()
        assert told[1] == told[0]
        for handle in handles:
            handle.remove()
        self.zero()

    def divide(self, factor: float, *modes: str) -> None:
        """Gradients are sums over ranks divided by another number than that of the ranks."""
        units = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        for unit in units:
            unit.set_gradient_divide_factor(factor)
        self.changed(dist.get_world_size() / factor, *modes)
        for unit in units:
            unit.set_gradient_divide_factor(dist.get_world_size())

    def reduced_by_hook(self, *modes: str) -> None:
        """Hooks on reduced gradients, in place of some communication of the user's."""
        units = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        if not all(map(has_one_mesh, units)):
            return
        for unit in units:
            unit.set_all_reduce_hook(lambda part: part.mul_(0.5))
        self.changed(0.5, *modes)
        for unit in units:
            unit.set_all_reduce_hook(lambda part: None)

    def changed(self, factor: float, *modes: str) -> None:
        """A step without the optimizer, whose gradients come out with a factor."""
        modes = tuple(mode for mode in modes if mode not in ("reduce", "not last"))
        for mode in modes:
            self.micro(mode)
        losses = self.forward(*self.batch())
        self.backward(*losses)
        if not losses[0].requires_grad:
            self.zero()
        # The average of averages is the average.
        average_gradients(self.plain)
        for parameter in self.plain.parameters():
            if parameter.grad is not None:
                parameter.grad *= factor
        self.after_backward()
        self.zero()

    def unused(self, number: int, *modes: str) -> None:
        """Ranks use other modules than others; what a rank did not use counts as zeros."""
        model = self.model
        assert isinstance(model, FSDPModule)
        trained = any(parameter.requires_grad for parameter in self.plain.own.parameters())
        if not trained or self.plain.layer.recomputed == "reentrant":
            return  # on some ranks there might be nothing to compute gradients of
        policies = [unit.config.comm_options.policy for unit in units_in(model)]
        if any(policy is not None and policy.error_feedback for policy in policies):
            return  # what earlier gradients have left follows, where this one is zero, too
        model.set_reduce_scatter_unused_params(True)
        # Units that are recomputed in one region with them would be gathered at other moments. And
        # with a node that writes in place, another rank writes to what comes from a unit.
        in_one_region = {
            inner
            for node in nodes(model)
            if node.layer.recomputed and len(units_in(node)) > isinstance(node, FSDPModule)
            for inner in nodes(node)
        }
        free = [
            (plain, node)
            for plain, node in zip(nodes(self.plain), nodes(model), strict=True)
            if not units_in(node) and node not in in_one_region and not node.layer.writes
        ]
        if free:
            for node in free[number % len(free)]:
                node.absent = (dist.get_rank() + number) % 2 == 0
        for node in self.node(number + 1, units=True):  # that of no rank is used
            node.absent = node not in self.both()
        for mode in modes:
            with self.mode(mode):
                self.backward(*self.forward(*self.batch()))
        self.backward(*self.forward(*self.batch()))
        for parameter in self.plain.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.after_backward()
        model.set_reduce_scatter_unused_params(False)
        for each in self.both():
            for node in nodes(each):
                node.absent = False
        self.zero()

    def abandoned(self, mode: str, to_none: bool) -> None:
        """Gradients of a micro-batch are dropped before the next one."""
        self.micro(mode)
        self.zero(to_none=to_none)
        losses = self.forward(*self.batch())
        self.backward(*losses)
        if to_none and losses[0].requires_grad:
            self.after_backward()
        self.zero()

    # -- limits -------------------------------------------------------------------------------

    def budget(self, what: Operation) -> None:
        """The least limit on gathered bytes that works, as errors tell it."""
        assert isinstance(self.model, FSDPModule)
        if self.keeps_storage:
            return  # either, or
        self.free()
        limit: int | None = 1
        for _ in range(6):
            self.model.set_max_gathered_bytes(limit)
            try:
                self.do(what)
                break
            except GatherBudgetError as error:
                limit = error.least_bytes
                self.zero()
                # The plain model has been through this forward.
                for buffer, expected in zip(
                    self.model.buffers(), self.plain.buffers(), strict=True
                ):
                    buffer.copy_(expected)
                self.free()
        # Other ways through the model may need more.
        self.model.set_max_gathered_bytes(10**6)
        self.limited = True

    # -- exceptions --------------------------------------------------------------------------

    def raised(self, number: int, place: str, kind: str) -> bool:
        """Whether a forward and backward raised, at this place of a node; the same of both."""
        if place.startswith("backward") and self.changes_in_place():
            return False
        batch = self.batch()
        raised = []
        for each, node in zip(self.both(), self.node(number), strict=True):
            node.fault = f"{place}/{kind}"
            handle = add_faulty_hook(node, place) if place in HOOK_FAULTS else None
            try:
                loss = (each(*batch) - 1).square().mean()
                if loss.requires_grad and "backward" in place:
                    loss.backward()
            except (PlannedError, KeyboardInterrupt):
                raised.append(each)
            node.fault = ""
            if handle is not None:
                handle.remove()
        assert len(raised) in (0, 2)
        return bool(raised)

    def fail(self, number: int, place: str, kind: str) -> None:
        """An exception in forward or backward; all gradients are dropped after it."""
        self.raised(number, place, kind)
        self.zero()

    def stumble(self, number: int, place: str) -> None:
        """A forward that raises. Gradients and graphs stay."""
        self.raised(number, place, "error")

    def retried(self, mode: str, number: int, place: str) -> None:
        """A micro-batch fails after one that did not, and another one follows."""
        self.micro(mode)
        before = [parameter.grad for parameter in self.plain.parameters()]
        before = [None if grad is None else grad.clone() for grad in before]
        raised = self.raised(number, place, "error")
        if raised:
            for parameter, grad in zip(self.plain.parameters(), before, strict=True):
                parameter.grad = grad
        batch = self.batch()
        losses = [(self.plain(*batch) - 1).square().mean()]
        try:
            losses.append((self.model(*batch) - 1).square().mean())
        except RuntimeError as error:
            # What the failed backward has added cannot be told from what was there.
            said = "in the middle of an accumulation" in str(error)
            if not (said and raised and "backward" in place):
                raise
            for buffer, expected in zip(self.model.buffers(), self.plain.buffers(), strict=True):
                buffer.copy_(expected)
        else:
            assert_same(losses[1], losses[0], "loss after a failure")
            self.backward(*losses)
            if self.had_backward:
                self.after_backward()
        self.zero()

    def reset(self, mode: str, number: int, place: str) -> None:
        """The iteration is dropped, perhaps after an exception."""
        assert isinstance(self.model, FSDPModule)
        with self.mode(mode):
            self.backward(*self.forward(*self.batch()))
            if place:
                self.raised(number, place, "error")
        self.model.reset_iter_state()
        assert_sharded(self.model)
        assert all(parameter.grad is None for parameter in self.model.parameters())
        self.plain.zero_grad()
        losses = self.forward(*self.batch())
        self.backward(*losses)
        self.after_backward()
        self.zero()
