"""`copy.deepcopy`, pickle and `torch.save` of sharded tensors: parameters, gradients, state dicts.

Also on ranks that hold no rows of a parameter, and of tensors that lie in the middle of a storage.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2 import CPUOffloadPolicy
from harness import cached_mesh, distributed, ours_only
from models import EVEN_MLP, MLP
from reference import assert_same_gradients, pair, run_both


def by_deepcopy(value: Any) -> Any:
    return copy.deepcopy(value)


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def by_torch_save(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)  # weights_only, by default


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": by_deepcopy,
    "pickle": by_pickle,
    "torch_save": by_torch_save,
}


def assert_copied(copied: Tensor, original: Tensor, what: str) -> None:
    """Equal, laid out alike, with memory of its own, and a tensor that can be computed with."""
    assert type(copied) is type(original), what
    assert copied.requires_grad == original.requires_grad, what
    if isinstance(original, DTensor):
        assert isinstance(copied, DTensor)
        assert copied.shape == original.shape, what
        assert copied.placements == original.placements, what
        assert copied.device_mesh == original.device_mesh, what
        copied, original = copied.detach().to_local(), original.detach().to_local()
    assert torch.equal(copied, original), what
    before = original.clone()
    copied.add_(1)
    assert torch.equal(original, before), f"{what} shares memory"


def assert_all_copied(copied: Mapping[Any, Any], original: Mapping[Any, Any], path: str) -> None:
    assert list(copied) == list(original), path
    for key, value in original.items():
        if isinstance(value, Mapping):
            assert_all_copied(copied[key], value, f"{path}.{key}")
        elif isinstance(value, Tensor):
            assert_copied(copied[key], value, f"{path}.{key}")
        else:
            assert copied[key] == value, f"{path}.{key}"


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("options", ["plain", "hsdp", "offload"])
@distributed(3, long=(4,))
def test_tensors_and_state_dicts(how: str, options: str) -> None:
    """The last parameters have one row, so that two of three ranks hold none of them."""
    chosen: dict[str, dict[str, Any]] = {
        "plain": {},
        "hsdp": {"mesh": cached_mesh(1, dist.get_world_size(), names=("r", "s"))},
        "offload": {"offload_policy": CPUOffloadPolicy()},
    }
    model, _ = pair(MLP, **chosen[options])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    copied = COPIES[how]
    for step in range(2):  # before the first forward, and after a step
        assert_all_copied(copied(model.state_dict()), model.state_dict(), "state_dict")
        assert_all_copied(copied(optimizer.state_dict()), optimizer.state_dict(), "optimizer")
        MLP.loss(model, *MLP.batch(step, dist.get_rank(), torch.float64)).backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            assert_copied(copied(param.grad), param.grad, f"gradient of {name}")
            again = copied(param)
            assert_copied(again, param, name)
            if how == "deepcopy":  # the others leave gradients out
                assert_copied(again.grad, param.grad, f"gradient in the copy of {name}")
        optimizer.step()
        optimizer.zero_grad()


@distributed(3)
def test_a_file_has_this_ranks_rows_and_no_more() -> None:
    model, _ = pair(MLP)
    for name, value in model.state_dict().items():
        local = value.to_local()
        assert local.untyped_storage().nbytes() == local.numel() * 8, name


@distributed(3)
def test_parameters_on_the_meta_device() -> None:
    model, _ = pair(MLP)
    model.to("meta")
    copied = copy.deepcopy(model.state_dict())
    for name, value in model.state_dict().items():
        assert copied[name].is_meta
        assert copied[name].to_local().shape == value.to_local().shape


@ours_only("what shards are stored in")
@distributed(2)
def test_shards_are_not_shared_with_other_processes() -> None:
    """Sharing moves a storage to shared memory, and the unit would go on with the old one."""
    model, plain = pair(EVEN_MLP)
    run_both(EVEN_MLP, model, plain, 0)
    for param in model.parameters():
        for value in (param.detach(), param.to_local().detach(), param.grad.to_local()):
            with pytest.raises(RuntimeError, match=r"cannot be shared with other processes.*clone"):
                ForkingPickler.dumps(value)
        with pytest.raises(RuntimeError, match="Share a copy"):
            param.to_local().detach().share_memory_()
        ForkingPickler.dumps(param.to_local().detach().clone())
    with pytest.raises(RuntimeError, match=r"share_memory: its parameters are sharded"):
        model.share_memory()
    with torch.no_grad():
        for sharded, whole in zip(model.parameters(), plain.parameters(), strict=True):
            sharded.to_local().mul_(2)
            whole.mul_(2)
    for network in (model, plain):
        network.zero_grad()
    run_both(EVEN_MLP, model, plain, 1)
    assert_same_gradients(model, plain)
