"""torchao's optimizers, which quantize their state, over DTensors and with `whole_step`."""

from __future__ import annotations

import itertools
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fsdp2 import checkpoint, full_state_dict, fully_shard, load_full_state_dict
from fsdp2.optim import block_rows, whole_step
from harness import distributed, run_on

pytest.importorskip("torchao", reason="torchao is not installed")

KINDS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
STEPS = 4
EVEN = (64, 128, 192, 64)  # shards of 2 ranks consist of whole blocks
UNEVEN = (64, 128, 65, 7)  # 2 ranks: some shards are quantized otherwise than the parameter


def linear(sizes: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def sharded(sizes: tuple[int, ...], **options: Any) -> nn.Module:
    model = linear(sizes)
    for layer in model:  # type: ignore[attr-defined]
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def optimizer_of(kind: str, model: nn.Module) -> Any:
    import torchao.optim as ao

    return getattr(ao, kind)(model.parameters(), lr=1e-2)


def uncompiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return function


@dataclass
class Run:
    """Steps on batches that are the same on all ranks.

    Attributes:
        grads: whole gradients of each step; steps take those that are given.
        messages: the warnings about quantization.
    """

    grads: list[list[Any]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def train(self, model: nn.Module, optimizer: Any, compiled: bool = False) -> Run:
        for number in range(STEPS):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(8, model[0].in_features, generator=generator)  # type: ignore[index,call-overload]
            (model(x) - 1).square().mean().backward()
            grads: list[Any] = [p.grad for p in model.parameters()]
            if number < len(self.grads):
                for grad, given in zip(grads, self.grads[number], strict=True):
                    grad.copy_(
                        given
                    )  # averages over ranks are rounded, and quantization enlarges it
            else:
                self.grads.append([g.full_tensor() for g in grads])
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with mock.patch.object(torch, "compile", torch.compile if compiled else uncompiled):
                    optimizer.step()
            self.messages += [str(w.message) for w in caught if "quantize" in str(w.message)]
            optimizer.zero_grad()
        return self


def assert_those_of(model: nn.Module, whole: nn.Module) -> None:
    values = full_state_dict(model, ranks=range(dist.get_world_size()))
    for name, wanted in whole.state_dict().items():
        torch.testing.assert_close(values[name], wanted, rtol=1e-6, atol=1e-7, msg=name)


def quantized(optimizer: Any) -> list[bool]:
    states = [state["exp_avg"] for state in optimizer.state.values()]
    locals_ = [s._local_tensor if isinstance(s, DTensor) else s for s in states]
    return [hasattr(local, "block_size") for local in locals_]


@distributed(2)
def test_shards_of_whole_blocks_step_as_one_process() -> None:
    for kind in KINDS:
        whole, model = linear(EVEN), sharded(EVEN)
        one, ours = optimizer_of(kind, whole), optimizer_of(kind, model)
        run = Run().train(model, ours)
        assert run.messages == [], kind
        run.train(whole, one)
        assert sum(quantized(ours)) == 3, kind
        assert_those_of(model, whole)


@distributed(2)
def test_shards_that_are_quantized_differently_warn_at_the_first_step() -> None:
    """Once, before the step, and the same words on all ranks."""

    def columns(param: Tensor) -> Any:
        return Shard(param.ndim - 1)

    for sizes, options, words in (
        (UNEVEN, {}, ["'1.weight' of shape (65, 128), it quantizes the state of some shards, and"]),
        ((64, 96), {}, ["of shape (96, 64), it keeps the state of shards in full precision"]),
        (
            (64, 128),
            {"shard_placement_fn": columns},
            ["'0.weight' of shape (128, 64), shards do not begin and end where the blocks of"],
        ),
        ((64, 8), {}, []),  # too small for one process as well
    ):
        model = sharded(sizes, **options)
        messages = Run().train(model, optimizer_of("AdamW8bit", model)).messages
        assert len(messages) == len(words), (sizes, messages)
        for word in words:
            assert word in messages[0], messages
            assert "AdamW8bit over DTensors" in messages[0]
            assert "whole_step" in messages[0]


@distributed(3)
def test_ranks_without_rows_do_not_hide_a_difference() -> None:
    """Two ranks have two rows each, which are too few, and the third has none."""
    messages = Run().train(model := sharded((1088, 4)), optimizer_of("AdamW8bit", model)).messages
    assert len(messages) == 1
    assert "'0.weight' of shape (4, 1088), it keeps the state of shards in full" in messages[0]


BLOCKS = {"AdamW8bit": 256, "AdamW4bit": 128, "AdamWFp8": 256}  # elements


@pytest.mark.parametrize("kind", KINDS)
@distributed(2, 3, long=(1, 4))
def test_steps_over_shards_of_whole_blocks_are_those_of_one_process(kind: str) -> None:
    """Bit for bit, whatever the shapes: of some, a few ranks hold all rows."""
    rows = block_rows(BLOCKS[kind], min_numel=4096)
    for sizes in (UNEVEN, (64, 96, 200)):
        whole, model = linear(sizes), sharded(sizes, shard_granularity=rows)
        one, ours = optimizer_of(kind, whole), optimizer_of(kind, model)
        run = Run().train(model, ours)
        assert run.messages == []
        run.train(whole, one)
        assert any(quantized(one))
        values = full_state_dict(model, ranks=range(dist.get_world_size()))
        for name, wanted in whole.state_dict().items():
            assert torch.equal(values[name], wanted), name


@distributed(2, 3)
def test_whole_step_quantizes_as_one_process() -> None:
    for kind in KINDS:
        whole, model = linear(UNEVEN), sharded(UNEVEN)
        one, ours = optimizer_of(kind, whole), whole_step(optimizer_of(kind, model))
        run = Run().train(model, ours)
        assert run.messages == [], kind
        run.train(whole, one)
        assert any(quantized(one)), kind
        assert_those_of(model, whole)


@distributed(2)
def test_quantized_state_of_a_plain_model_needs_whole_step() -> None:
    whole, model = linear(UNEVEN), sharded(UNEVEN)
    one, ours = optimizer_of("AdamW8bit", whole), optimizer_of("AdamW8bit", model)
    other = sharded(UNEVEN)
    Run().train(other, whole_step(optimizer_of("AdamW8bit", other))).train(whole, one)
    state = pickle.loads(pickle.dumps(one.state_dict()))
    with pytest.raises(ValueError, match=r"'exp_avg' of parameter '0.weight' .*whole_step"):
        ours.load_state_dict(state)
    assert not ours.state
    load_full_state_dict(model, whole.state_dict())
    whole_step(ours).load_state_dict(state)
    Run().train(model, ours).train(whole, one)
    assert_those_of(model, whole)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
@distributed(2, timeout_s=500)
def test_compiled_steps_are_those_of_one_process(kind: str) -> None:
    """As torchao's optimizers step by default: it compiles the step of each shape of parameter."""
    sizes = (64, 128)
    # torch's cache on disk takes graphs for DTensors of one kind for those of another.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        for wrap in (lambda optimizer: optimizer, whole_step):
            whole, model = linear(sizes), sharded(sizes)
            one, ours = optimizer_of(kind, whole), wrap(optimizer_of(kind, model))
            run = Run().train(model, ours, compiled=True)
            assert run.messages == []
            run.train(whole, one, compiled=True)
            assert any(quantized(one))
            assert_those_of(model, whole)


def train_and_save(model: Any, optimizer: Any, folder: str, *, load: bool) -> None:
    """With ``load``, what another run has saved in its place."""
    checkpoints = checkpoint.Checkpointer(folder)
    if load:
        checkpoints.load(model=model, optimizer=optimizer)
    else:
        Run().train(model, optimizer)
        checkpoints.save(1, model=model, optimizer=optimizer)


def step_once_more(model: Any, optimizer: Any) -> Any:
    """The weights afterwards."""
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with mock.patch.object(torch, "compile", uncompiled):
        optimizer.step()
    return full_state_dict(model, ranks=range(dist.get_world_size()))


def stepped_whole(kind: str, folder: str, *, load: bool) -> tuple[dict[str, Any], Any]:
    model = sharded(UNEVEN)
    optimizer = whole_step(optimizer_of(kind, model))
    train_and_save(model, optimizer, folder, load=load)
    state = optimizer.state[next(iter(model.parameters()))]["exp_avg"]
    # In float32, which holds every value of float8: gloo does not gather that.
    found = {name: t.float().full_tensor() for name, t in state["tensors"].items()}
    return found, step_once_more(model, optimizer)


@pytest.mark.parametrize("kind", ["AdamW8bit", pytest.param("AdamWFp8", marks=pytest.mark.long)])
def test_state_of_whole_step_loads_on_any_number_of_ranks(tmp_path: Path, kind: str) -> None:
    saved = run_on(2, stepped_whole, kind, str(tmp_path), load=False)[0]
    loaded = run_on(3, stepped_whole, kind, str(tmp_path), load=True)[0]
    for before, now in zip(saved, loaded, strict=True):
        assert before.keys() == now.keys()
        for name, value in before.items():
            assert torch.equal(value.view(torch.uint8), now[name].view(torch.uint8)), name


def steps_in_blocks(folder: str, *, load: bool) -> dict[str, Any]:
    """The weights after some steps and one more; before that one, state is saved or loaded."""
    model = sharded(UNEVEN, shard_granularity=block_rows(256, min_numel=4096))
    optimizer = optimizer_of("AdamW8bit", model)
    train_and_save(model, optimizer, folder, load=load)
    return step_once_more(model, optimizer)


def test_quantized_state_in_blocks_loads_on_any_number_of_ranks(tmp_path: Path) -> None:
    saved = run_on(2, steps_in_blocks, str(tmp_path), load=False)[0]
    for world_size in (1, 3):
        loaded = run_on(world_size, steps_in_blocks, str(tmp_path), load=True)[0]
        for name, value in saved.items():
            assert torch.equal(loaded[name], value), (world_size, name)
