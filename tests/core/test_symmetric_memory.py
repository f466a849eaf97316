"""`set_symm_mem_for_comm`, on a stand-in for torch's symmetric memory that has its rules.

A stand-in, as it needs CUDA, NCCL and links between GPUs. What one GPU can show of the real one is
in `test_one_rank_group.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2.sharding.gathered as gathered_module
from fsdp2 import FSDPModule, fully_shard
from fsdp2.api import comm_settings
from fsdp2.runtime.unit import unit_of
from fsdp2.transports import custom
from harness import distributed, ours_only
from models import BY_NAME
from reference import assert_same_gradients, pair, run_both

pytestmark = ours_only("a stand-in for memory")
NCCL = "torch.distributed._symmetric_memory"


@dataclass
class Memory:
    """Torch's pool for symmetric memory: whole segments, the smallest free one that is enough.

    Attributes:
        sizes: bytes of each segment, in the order in which they were made.
        registered: (segment, ranks of the group) in the order of the calls that all ranks make.
        called: how often registrations were asked for.
    """

    sizes: list[int] = field(default_factory=list)
    registered: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    called: int = 0
    _open: bool = False
    _free: set[int] = field(default_factory=set)
    _of_storage: dict[int, int] = field(default_factory=dict)

    @contextlib.contextmanager
    def allocating(self, device: torch.device) -> Iterator[None]:
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """In place of `gathered.resize`."""
        if storage.nbytes() and (segment := self._of_storage.pop(storage._cdata, None)) is not None:
            self._free.add(segment)
        storage.resize_(nbytes)
        if nbytes and self._open:
            self._of_storage[storage._cdata] = self._take(nbytes)

    def _take(self, nbytes: int) -> int:
        fitting = [i for i in self._free if self.sizes[i] >= nbytes]
        if not fitting:
            self.sizes.append(nbytes)
            return len(self.sizes) - 1
        segment = min(fitting, key=lambda i: (self.sizes[i], i))
        self._free.remove(segment)
        return segment

    def rendezvous(self, tensor: torch.Tensor, group: str) -> None:
        segment = self._of_storage.get(tensor.untyped_storage()._cdata)
        assert segment is not None, "not within any symmetric memory"
        resolved = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
        self.called += 1
        key = (segment, tuple(dist.get_process_group_ranks(resolved)))
        if key not in self.registered:
            self.registered.append(key)


@contextlib.contextmanager
def stand_in() -> Iterator[Memory]:
    memory = Memory()
    with (
        mock.patch.object(custom, "allocating_symmetric", memory.allocating),
        mock.patch.object(gathered_module, "resize", memory.resize),
        mock.patch(f"{NCCL}.rendezvous", memory.rendezvous),
    ):
        yield memory


def set_symmetric(model: nn.Module) -> None:
    """`set_symm_mem_for_comm` of all units, without its look at device and backend."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            unit = unit_of(module)
            options = replace(unit.config.comm_options, memory="symmetric")
            comm_settings._change(unit, "set_symm_mem_for_comm", options)


def assert_alike(memory: Memory) -> None:
    """All ranks have made the same segments and registered them in the same order."""
    mine = (memory.sizes, memory.registered)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    assert all(each == everyone[0] for each in everyone), everyone


@pytest.mark.parametrize("direct", [0, 10**9])
@pytest.mark.parametrize("name", ["mlp", "transformer"])
@distributed(2, 3)
def test_training(name: str, direct: int) -> None:
    """Values are right, and what is gathered lies in registered memory, of a few segments."""
    case = BY_NAME[name]
    with stand_in() as memory:
        model, plain = pair(case, direct_min_bytes=direct)
        set_symmetric(model)
        for step in range(3):
            run_both(case, model, plain, step)
            assert_same_gradients(model, plain)
            for each in (model, plain):
                each.zero_grad()
            if step == 0:
                first = len(memory.registered)
        assert len(memory.registered) == first, "in the first step, and never again"
        assert memory.called > first
        assert_alike(memory)


@distributed(2)
def test_units_take_turns_in_the_same_memory() -> None:
    with stand_in() as memory:
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
        for layer in model:
            fully_shard(layer, reshard_after_forward=True)
        fully_shard(model)
        set_symmetric(model)
        for _ in range(2):
            model(torch.ones(2, 16)).sum().backward()
    assert len(memory.sizes) == 2, "one computes while another one is gathered"


@distributed(2)
def test_several_reductions_may_be_in_flight() -> None:
    case = BY_NAME["transformer"]
    with stand_in() as memory:
        model, plain = pair(case)
        set_symmetric(model)
        model.set_reduce_scatter_max_input_buffers(2)
        run_both(case, model, plain, 0)
        assert_same_gradients(model, plain)
        assert_alike(memory)


@pytest.mark.parametrize("size", [False, 2])
@distributed(4)
def test_groups_of_fewer_ranks_register_it_too(size: bool | int) -> None:
    case = BY_NAME["mlp"]
    with stand_in() as memory:
        model, plain = pair(case, reshard_after_forward=size)
        set_symmetric(model)
        for step in range(2):
            run_both(case, model, plain, step)
            assert_same_gradients(model, plain)
            model.zero_grad()
            plain.zero_grad()
        rank = dist.get_rank()
        ranks = {group for _, group in memory.registered}
        pair_of_ranks = (rank // 2 * 2, rank // 2 * 2 + 1)
        assert ranks == ({(0, 1, 2, 3), pair_of_ranks} if size else {(0, 1, 2, 3)})


@distributed(2)
def test_a_parameter_that_one_rank_holds_does_not_part_the_ranks() -> None:
    """A rank that keeps memory which others free would take new segments where they do not."""
    held: list[torch.Tensor] = []

    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(64, 8)
            self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            if dist.get_rank() == 0:
                held.append(self.embedding.weight.view(-1))  # a debugger, say
            return self.blocks(self.embedding(tokens))

    with stand_in() as memory, mock.patch.object(gathered_module, "OWN_PIECE_MIN_BYTES", 512):
        model = Embedded()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model, direct_min_bytes=0)
        other = fully_shard(nn.Linear(16, 20))  # takes what the embedding leaves
        set_symmetric(model)
        set_symmetric(other)
        loss = model(torch.arange(6)).sum()
        other(torch.ones(2, 16))
        loss.backward()
        assert_alike(memory)


@pytest.mark.parametrize("sum_only", [False, True])
@distributed(2)
def test_reductions_use_it_for_sums_only(sum_only: bool) -> None:
    case = BY_NAME["mlp"]
    with stand_in() as memory:
        model, plain = pair(case)
        set_symmetric(model)
        buffers: list[int] = []
        real, registered = torch.empty, memory.rendezvous

        def empty(*args: Any, **options: Any) -> torch.Tensor:
            made = real(*args, **options)
            if memory._open:
                memory._of_storage[made.untyped_storage()._cdata] = memory._take(made.nbytes)
                buffers.append(made.untyped_storage()._cdata)
            return made

        def rendezvous(tensor: torch.Tensor, group: str) -> None:
            seen.append(tensor.untyped_storage()._cdata)
            registered(tensor, group)

        seen: list[int] = []
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(sum_only)
        with (
            mock.patch.object(custom.torch, "empty", empty),
            mock.patch(f"{NCCL}.rendezvous", rendezvous),
        ):
            run_both(case, model, plain, 0)
        assert_same_gradients(model, plain)
        assert bool(buffers) == sum_only
        assert set(buffers) <= set(seen), "input and output"


# ------------------------------------------------------------------------------------- the backend


def test_the_backend_is_chosen_once_or_an_error_says_why_not() -> None:
    chosen: list[str] = []
    device = torch.device("cpu")

    def refuse(name: str) -> None:
        raise RuntimeError("no such backend")

    with (
        mock.patch(f"{NCCL}.get_backend", side_effect=lambda _: (chosen or [None])[-1]),
        mock.patch(f"{NCCL}.set_backend", chosen.append),
        mock.patch("torch.cuda.nccl.version", return_value=(2, 26, 2)),
    ):
        custom.choose_symmetric_backend(device)
        custom.choose_symmetric_backend(device)
        assert chosen == ["NCCL"]
        chosen[:] = ["CUDA"]
        with (
            mock.patch(f"{NCCL}.set_backend", refuse),
            pytest.raises(RuntimeError, match=r"NCCL \(2, 26, 2\) cannot .*no such backend"),
        ):
            custom.choose_symmetric_backend(device)
