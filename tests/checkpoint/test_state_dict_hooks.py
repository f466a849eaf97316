"""Modules whose ``state_dict`` hooks split, scale, rename or distribute parameters: what the hooks
make is saved, and every load reverses it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp2 import full_state_dict, fully_shard, load_full_state_dict
from fsdp2.checkpoint import Checkpointer, CheckpointError, load_model, save_model
from harness import distributed, shared_folder
from reference import whole


class Saved(nn.Linear):
    """Saves its weight in another form."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._register_state_dict_hook(_after_save)
        self.register_load_state_dict_pre_hook(_before_load)

    def forms(self, weight: Tensor) -> dict[str, Tensor]: ...  # type: ignore[empty-body]
    def weight_of(self, forms: dict[str, Tensor]) -> Tensor: ...  # type: ignore[empty-body]


def _after_save(module: Any, states: dict[str, Any], prefix: str, metadata: Any) -> None:
    forms = module.forms(states.pop(prefix + "weight"))
    states.update({prefix + name: value for name, value in forms.items()})


def _before_load(module: Any, states: dict[str, Any], prefix: str, *_: Any) -> None:
    names = module.forms(torch.ones(6, 4))
    states[prefix + "weight"] = module.weight_of({n: states.pop(prefix + n) for n in names})


class Scaled(Saved):
    def forms(self, weight: Tensor) -> dict[str, Tensor]:
        return {"weight": weight * 2}

    def weight_of(self, forms: dict[str, Tensor]) -> Tensor:
        return forms["weight"] / 2


class Transposed(Saved):
    def forms(self, weight: Tensor) -> dict[str, Tensor]:
        return {"weight": weight.t()}

    def weight_of(self, forms: dict[str, Tensor]) -> Tensor:
        return forms["weight"].t()


class Renamed(Saved):
    def forms(self, weight: Tensor) -> dict[str, Tensor]:
        return {"w": weight}

    def weight_of(self, forms: dict[str, Tensor]) -> Tensor:
        return forms["w"]


class Split(Saved):
    def forms(self, weight: Tensor) -> dict[str, Tensor]:
        return dict(zip("qkv", weight.chunk(3), strict=True))

    def weight_of(self, forms: dict[str, Tensor]) -> Tensor:
        return torch.cat(list(forms.values()))


class Distributed(Split):
    """Each of the three is sharded as the whole is."""

    def forms(self, weight: Tensor) -> dict[str, Tensor]:
        if not isinstance(weight, DTensor):
            return super().forms(weight)
        parts = super().forms(weight.full_tensor())
        mesh, placements = weight.device_mesh, weight.placements
        return {name: distribute_tensor(part, mesh, placements) for name, part in parts.items()}


KINDS = [Scaled, Transposed, Renamed, Split, Distributed]


def plain_model(kind: type[Saved]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(kind(4, 6), nn.Linear(6, 5))


def sharded(kind: type[Saved]) -> nn.Sequential:
    model = plain_model(kind)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model(torch.ones(2, 4))  # the root is gathered
    return model


def assert_loaded(kind: type[Saved], load: Callable[[nn.Module], Any]) -> None:
    model = sharded(kind)
    for layer in (*model, model):
        layer.reshard()  # type: ignore[operator]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model(torch.ones(2, 4))
    load(model)
    for layer in (*model, model):
        layer.reshard()  # type: ignore[operator]
    for name, wanted in plain_model(kind).named_parameters():
        assert torch.equal(whole(model.get_parameter(name)), wanted), name


@pytest.mark.parametrize("kind", KINDS)
@distributed(2, 3)
def test_whole_states_are_those_of_a_plain_model(kind: type[Saved]) -> None:
    wanted = plain_model(kind).state_dict()
    found = full_state_dict(sharded(kind))
    if dist.get_rank() == 0:
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
    given = copy.deepcopy(wanted) if dist.get_rank() == 0 else None
    assert_loaded(kind, lambda model: load_full_state_dict(model, given))


@pytest.mark.parametrize("kind", KINDS)
@distributed(2, 3)
def test_checkpoints_load_what_the_hooks_saved(kind: type[Saved]) -> None:
    model = sharded(kind)
    with shared_folder() as folder:
        Checkpointer(folder).save(1, model=model)
        assert_loaded(kind, lambda m: Checkpointer(folder).load("latest", model=m))
        save_model(model, f"{folder}/weights")
        assert_loaded(kind, lambda m: load_model(m, f"{folder}/weights"))
        alone = plain_model(kind)
        for parameter in alone.parameters():
            parameter.data.zero_()
        load_model(alone, f"{folder}/weights")
        for name, wanted in plain_model(kind).named_parameters():
            assert torch.equal(alone.get_parameter(name), wanted), name


@distributed(2)
def test_what_no_hook_reverses_is_an_error() -> None:
    model = sharded(Split)
    model[0]._load_state_dict_pre_hooks = {
        key: hook
        for key, hook in model[0]._load_state_dict_pre_hooks.items()
        if getattr(hook, "hook", hook) is not _before_load
    }
    wanted = plain_model(Split).state_dict() if dist.get_rank() == 0 else None
    advice = r"'0\.weight' was not loaded: .*register_load_state_dict_pre_hook"
    with shared_folder() as folder:
        save_model(model, f"{folder}/weights")
        with pytest.raises(RuntimeError, match=advice):
            load_model(model, f"{folder}/weights")
    with pytest.raises(RuntimeError, match=advice):
        load_full_state_dict(model, wanted)


@distributed(2)
def test_optimizers_of_parameters_that_hooks_replace_are_refused_at_the_save() -> None:
    model = sharded(Split)
    for layer in (*model, model):
        layer.reshard()  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        shared_folder() as folder,
        pytest.raises(CheckpointError, match=r"a state_dict hook of the model replaces"),
    ):
        Checkpointer(folder).save(1, model=model, optimizer=optimizer)
