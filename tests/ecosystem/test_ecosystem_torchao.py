"""torchao: float8 with scales of all weights at once, files and full states of quantized tensors.

`test_subclass_matrix` has training and resuming of each of its classes in every setting.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_full_state_subclasses import assert_alike, inner
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import harness
from fsdp2 import checkpoint, full_state_dict, fully_shard, load_full_state_dict
from fsdp2.optim import whole_step
from harness import cached_mesh, distributed
from reference import average_gradients
from subclass_models import Lora

pytest.importorskip("torchao", reason="torchao is not installed")

STEPS = 4
MESHES = {1: (), 2: (), 4: (2, 2)}


def converted(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "nf4":
        return nn.Sequential(Lora(128, 256), nn.Tanh(), Lora(256, 128))
    model = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 128))
    from torchao.prototype.quantized_training import bitnet, int8, int8_mixed_precision

    make: Any = {
        "int8 mixed precision": lambda w: (
            int8_mixed_precision.Int8MixedPrecisionTrainingLinearWeight(
                w, int8_mixed_precision.Int8MixedPrecisionTrainingConfig()
            )
        ),
        "int8 weights": int8.Int8QuantizedTrainingLinearWeight.from_float,
        "bitnet": bitnet.BitNetTrainingLinearWeight,
        "float8": lambda w: w,
        "plain": lambda w: w,
    }[kind]
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(make(layer.weight.detach()))
    if kind == "float8":
        from torchao import float8

        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        return float8.convert_to_float8_training(model, config=config)
    return model


def shard(model: nn.Module, **options: Any) -> nn.Module:
    world = dist.get_world_size()
    if MESHES[world]:
        options["mesh"] = cached_mesh(*MESHES[world], names=("replicate", "shard"))
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def batch(step: int, size: int = 128) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, size, generator=generator)


@pytest.mark.long
@pytest.mark.parametrize("precomputed", [False, True], ids=["", "scales of all weights at once"])
@distributed(2, 1, 4)
def test_float8_training_is_that_of_one_process(precomputed: bool) -> None:
    """Weights are gathered in float8; the CPU emulates the products."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    model, reference = shard(converted("float8")), converted("float8")
    sides = [model, reference]
    local: Any = model[0].weight._local_tensor
    assert isinstance(local, WeightWithDynamicFloat8CastTensor)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0, foreach=False) for m in sides]
    losses = []
    for step in range(STEPS):
        both = [(side(batch(step)) - 1).square().mean() for side in sides]
        for loss in both:
            loss.backward()
        average_gradients(reference)
        assert torch.allclose(both[0], both[1], rtol=1e-6), (step, both)
        losses.append(both[0].item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if precomputed:
            precompute_float8_dynamic_scale_for_fsdp(model)
            assert local._precomputed_scale is not None
    states = full_state_dict(model, ranks=range(dist.get_world_size()))
    for name, wanted in reference.state_dict().items():
        values = [getattr(tensor, "_tensor", tensor) for tensor in (states[name], wanted)]
        assert torch.allclose(*values, rtol=1e-5, atol=1e-6), name
    assert losses[-1] < losses[0]  # it learns at all


@distributed(2)
def test_steps_on_whole_int8_weights_are_refused_and_those_on_whole_others_work() -> None:
    """int8 weights round in each operation of a step, and cannot be sent as numbers."""
    for kind, refused in (("int8 weights", True), ("int8 mixed precision", False)):
        model = shard(converted(kind))
        optimizer = whole_step(torch.optim.AdamW(model.parameters()))
        model(batch(0)).square().mean().backward()
        if refused:
            words = (
                "cannot move a parameter of class Int8QuantizedTrainingLinearWeight.* AdamW on sh"
            )
            with pytest.raises(TypeError, match=words):
                optimizer.step()
        else:
            optimizer.step()


# -- state of optimizers ------------------------------------------------------------------------


def optimizer_of(kind: str, model: nn.Module) -> Any:
    import torchao.optim as ao

    return getattr(ao, kind)(model.parameters(), lr=1e-2)


def step_with(model: nn.Module, optimizer: Any, number: int) -> None:
    (model(batch(number)) - 1).square().mean().backward()
    with mock.patch.object(torch, "compile", lambda function, **options: function):
        optimizer.step()
    optimizer.zero_grad()


def save_state(kind: str, folder: str) -> list[Any]:
    model = shard(converted("plain"))
    optimizer = optimizer_of(kind, model)
    for number in range(2):
        step_with(model, optimizer, number)
    checkpoint.Checkpointer(folder).save(2, model=model, optimizer=optimizer)
    return after(model, optimizer)


def load_state(kind: str, folder: str, *, stepped: bool) -> list[Any]:
    model = shard(converted("plain"))
    optimizer = optimizer_of(kind, model)
    if stepped:
        step_with(model, optimizer, 7)
    checkpoint.Checkpointer(folder).load(model=model, optimizer=optimizer)
    return after(model, optimizer)


def after(model: nn.Module, optimizer: Any) -> list[Any]:
    """Whole values of parameters and state, then those of a step after them."""
    found = []
    for _ in range(2):
        for param, state in optimizer.state.items():
            for value in (param, *state.values()):
                local = value._local_tensor if isinstance(value, DTensor) else value
                plain = local.dequantize() if hasattr(local, "block_size") else local
                parts: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(parts, plain.detach())
                num = value.device_mesh.size(-1) if isinstance(value, DTensor) else 1
                found.append(torch.cat(parts[:num]) if num > 1 else plain.clone())
        x = torch.ones(1, 128)  # the same on any number of ranks
        (model(x) - 1).square().mean().backward()
        with mock.patch.object(torch, "compile", lambda function, **options: function):
            optimizer.step()
        optimizer.zero_grad()
    return found


def layouts(*default: tuple[int, int]) -> Any:
    """Numbers of ranks that save, and that load; 4 are two replicas of two shards."""
    found = [(saving, loading) for saving in MESHES for loading in MESHES]
    return pytest.mark.parametrize(
        ("saving", "loading"),
        [pytest.param(*two, marks=() if two in default else pytest.mark.long) for two in found],
    )


@pytest.mark.parametrize("stepped", [False, pytest.param(True, marks=pytest.mark.long)])
@layouts((2, 2))
@pytest.mark.parametrize(
    "kind",
    ["AdamW8bit", *(pytest.param(k, marks=pytest.mark.long) for k in ("AdamW4bit", "AdamWFp8"))],
)
def test_quantized_state_is_saved_and_loaded(
    tmp_path: Path, kind: str, saving: int, loading: int, stepped: bool
) -> None:
    saved = harness.run_on(saving, save_state, kind, str(tmp_path))[0]
    loaded = harness.run_on(loading, load_state, kind, str(tmp_path), stepped=stepped)[0]
    assert len(saved) == len(loaded)
    for before, now in zip(saved[: len(saved) // 2], loaded, strict=False):
        assert torch.equal(before, now)
    for before, now in zip(saved, loaded, strict=True):
        assert torch.allclose(before, now, rtol=1e-3, atol=1e-5)


def weights(kind: str, folder: str, *, save: bool) -> Any:
    model = shard(converted(kind))
    if save:
        checkpoint.save_model(model, folder)
    else:
        for param in model.parameters():
            local = param._local_tensor  # type: ignore[attr-defined]
            for name in getattr(local, "__tensor_flatten__", lambda: ((), None))()[0]:
                if name != "nf4":
                    getattr(local, name).zero_()
        checkpoint.load_model(model, folder)
    with torch.no_grad():
        return model(torch.ones(1, 128))


@layouts((2, 2))
@pytest.mark.parametrize(
    "kind",
    [
        "nf4",
        "int8 weights",
        *(pytest.param(k, marks=pytest.mark.long) for k in ("int8 mixed precision", "float8")),
    ],
)
def test_quantized_weights_are_saved_and_loaded(
    tmp_path: Path, kind: str, saving: int, loading: int
) -> None:
    folder = str(tmp_path / "weights")
    saved = harness.run_on(saving, weights, kind, folder, save=True)
    loaded = harness.run_on(loading, weights, kind, folder, save=False)
    assert all(torch.equal(out, saved[0]) for out in (*saved, *loaded))


def train_float8(folder: str, first: int, last: int, precomputed: bool) -> list[float]:
    """Losses of the steps from ``first`` to ``last``, with the same batch on all ranks; begins with
    the checkpoint of the step before, if there is one, and saves in the end."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    model = shard(converted("float8"))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    checkpoints = checkpoint.Checkpointer(folder)
    if first:
        checkpoints.load(model=model, optimizer=optimizer)
    losses = []
    for number in range(first, last):
        x = torch.randn(4, 128, generator=torch.Generator().manual_seed(number))
        loss = (model(x) - 1).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if precomputed:
            precompute_float8_dynamic_scale_for_fsdp(model)
    checkpoints.save(last, model=model, optimizer=optimizer)
    return losses


@pytest.mark.parametrize("precomputed", [False, True], ids=["", "scales of all weights at once"])
@layouts()
def test_float8_training_goes_on_from_its_checkpoint(
    tmp_path: Path, saving: int, loading: int, precomputed: bool
) -> None:
    never, resumed = str(tmp_path / "never"), str(tmp_path / "resumed")
    wanted = harness.run_on(1, train_float8, never, 0, 4, precomputed)[0]
    found = harness.run_on(saving, train_float8, resumed, 0, 2, precomputed)[0]
    found += harness.run_on(loading, train_float8, resumed, 2, 4, precomputed)[0]
    assert found == pytest.approx(wanted, rel=1e-4)
    assert found[-1] < 0.98 * found[0]


@pytest.mark.long
@distributed(1, 2)
def test_the_scale_of_bitnet_is_that_of_the_weights_that_compute() -> None:
    """Its scale is metadata: another one in every gather."""
    from torchao.prototype.quantized_training import bitnet

    model = converted("bitnet")
    shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    seen: list[Any] = []
    model[0].register_forward_pre_hook(  # type: ignore[index,operator]
        lambda module, args: seen.append(module.weight.scale.clone())
    )
    for step in range(STEPS):
        wholes = [p.full_tensor() for p in model.parameters()]
        (model(batch(step)) - 1).square().mean().backward()
        now = bitnet.get_bitnet_scale(getattr(wholes[0], "_data", wholes[0]))
        assert torch.allclose(seen[-1], now, rtol=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.allclose(seen[0], seen[-1], rtol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["nf4", "int8 weights", "int8 mixed precision", "bitnet"])
@distributed(2, 1)
def test_whole_weights_are_those_of_one_process(kind: str) -> None:
    whole, model = converted(kind), shard(converted(kind))
    x = torch.ones(1, 128)
    with torch.no_grad():
        out = model(x)
    states = full_state_dict(model, ranks=range(dist.get_world_size()))
    for name, value in whole.state_dict().items():
        assert_alike(states[name], value)
    one = converted(kind)
    for param in one.parameters():
        if not hasattr(param, "__tensor_flatten__"):
            param.data.zero_()
    one.load_state_dict(states, assign=True)
    with torch.no_grad():
        assert torch.allclose(one(x), out, rtol=1e-5, atol=1e-6)
    for param in model.parameters():
        local: Any = param._local_tensor
        for name, value in (inner(local) if hasattr(local, "block_size") else {}).items():
            if name not in ("nf4", "scaler_mean"):
                value.zero_()
    load_full_state_dict(model, states)
    with torch.no_grad():
        assert torch.equal(model(x), out)
