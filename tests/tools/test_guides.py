"""The guides: what they show runs, trains as what it replaces, and names all that people have."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import harness
from harness import distributed, shared_folder

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: about its own pages", allow_module_level=True)

from pages import ROOT, blocks

GUIDES = ROOT / "docs" / "guides"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Losses:
    """A loss function that keeps what it gave."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        self.values.append(loss.item())
        return loss


def code(page: str, heading: str) -> str:
    """The blocks of Python under a heading, together."""
    found = [
        b.code for b in blocks(GUIDES / page) if (b.language, b.heading) == ("python", heading)
    ]
    assert found, f"{page} has no code under {heading!r}"
    return "".join(found)


def run(page: str, heading: str, num_steps: int = 3, **names: Any) -> dict[str, Any]:
    """Run what stands under a heading, with the names that the guides take for given."""
    torch.manual_seed(0)
    names.setdefault("loss_fn", Losses())
    given = {
        "Model": Model,
        "Block": Block,
        "device": torch.device("cpu"),
        "rank": dist.get_rank(),
        "loader": batches(num_steps),
        **names,
    }
    exec(compile(code(page, heading), f"{page}: {heading}", "exec"), given)
    return given


def batches(num_steps: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Two micro-batches a step, of this rank."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    tokens = torch.randint(32, (num_steps, 2, 2, 3, 5), generator=generator)
    return [[(inputs, targets) for inputs, targets in step] for step in tokens]


@contextlib.contextmanager
def in_one_folder() -> Iterator[None]:
    """All ranks work in one new folder."""
    here = os.getcwd()
    with shared_folder() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)


def assert_equal_state(
    ours: dict[str, Any], theirs: dict[str, Tensor], moments: list[Tensor]
) -> None:
    """Parameters and first moments of AdamW are those of the other library."""
    for name, param in ours["model"].named_parameters():
        assert isinstance(param, DTensor)
        torch.testing.assert_close(param.full_tensor(), theirs[name])
    state = ours["optimizer"].state
    for param, moment in zip(ours["model"].parameters(), moments, strict=True):
        torch.testing.assert_close(state[param]["exp_avg"].full_tensor(), moment)


def names_of(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "module", "kwargs"}


def assert_named(page: str, names: set[str]) -> None:
    text = (GUIDES / page).read_text()
    missing = sorted(name for name in names if f"`{name}" not in text and f".{name}" not in text)
    assert not missing, f"{page} does not say what becomes of {missing}"


# ------------------------------------------------------------------------------------------- DDP


@distributed(2)
@in_one_folder()
def test_ddp_and_its_replacement_have_equal_losses() -> None:
    before, after = run("from_ddp.md", "Before"), run("from_ddp.md", "After")
    assert after["loss_fn"].values == pytest.approx(before["loss_fn"].values, rel=1e-4)
    assert Path("checkpoints/step-000001/model.safetensors").is_file()


@distributed(2)
@in_one_folder()
def test_a_checkpoint_of_ddp_is_gone_on_from() -> None:
    before = run("from_ddp.md", "Before")
    dist.barrier()
    after = run("from_ddp.md", "After", num_steps=0)
    run("from_ddp.md", "Resuming from a DDP checkpoint", **after)
    moments = [before["optimizer"].state[p]["exp_avg"] for p in before["model"].parameters()]
    assert_equal_state(after, dict(before["model"].module.named_parameters()), moments)


def test_the_guide_names_every_argument_and_method_of_ddp() -> None:
    methods = {name for name in vars(DistributedDataParallel) if not name.startswith("_")}
    internal = {
        "forward", "scatter", "to_kwargs", "gather", "train", "join_hook", "join_device",
        "join_process_group", "will_sync_module_buffers", "should_finalize_after_backward",
    }  # fmt: skip
    assert_named("from_ddp.md", names_of(DistributedDataParallel.__init__) | (methods - internal))


# ----------------------------------------------------------------------------------------- FSDP1

fsdp1_is_whole = pytest.mark.skipif(
    torch.__version__ < (2, 15), reason="torch's FSDP1 crashes in state_dict() on the CPU"
)


@fsdp1_is_whole
@distributed(2)
@in_one_folder()
def test_fsdp1_and_its_replacement_have_equal_losses() -> None:
    before, after = run("from_fsdp1.md", "Before"), run("from_fsdp1.md", "After")
    assert after["loss_fn"].values == pytest.approx(before["loss_fn"].values, rel=1e-3)
    assert Path("checkpoints/step-000001/model.safetensors").is_file()


@fsdp1_is_whole
@distributed(2)
@in_one_folder()
def test_a_checkpoint_of_fsdp1_is_gone_on_from() -> None:
    run("from_fsdp1.md", "Before")
    dist.barrier()
    after = run("from_fsdp1.md", "After", num_steps=0)
    run("from_fsdp1.md", "Resuming from an FSDP1 checkpoint", **after)
    saved = torch.load("fsdp1.pt")
    state = saved["optimizer"]["state"]
    moments = [state[name]["exp_avg"] for name, _ in after["model"].named_parameters()]
    assert_equal_state(after, saved["model"], moments)


def test_the_guide_names_every_argument_strategy_and_method_of_fsdp1() -> None:
    methods = {name for name in vars(FullyShardedDataParallel) if not name.startswith("_")}
    names = names_of(FullyShardedDataParallel.__init__) | names_of(MixedPrecision.__init__)
    names |= {strategy.name for strategy in ShardingStrategy}
    assert_named("from_fsdp1.md", names | (methods - {"forward", "module"}))


# ----------------------------------------------------------------------------------- torch FSDP2


@distributed(2)
@in_one_folder()
def test_torch_fsdp2_and_its_replacement_have_equal_losses() -> None:
    before, after = run("from_torch_fsdp2.md", "Before"), run("from_torch_fsdp2.md", "After")
    assert after["loss_fn"].values == pytest.approx(before["loss_fn"].values, rel=1e-3)
    assert before["model"].__class__.__mro__ != after["model"].__class__.__mro__


@distributed(2)
@in_one_folder()
def test_a_checkpoint_of_torch_is_gone_on_from() -> None:
    before = run("from_torch_fsdp2.md", "Before")
    after = run("from_torch_fsdp2.md", "After", num_steps=0)
    run("from_torch_fsdp2.md", "Resuming from a torch checkpoint", **after)
    theirs = {name: p.full_tensor() for name, p in before["model"].named_parameters()}
    moments = [
        before["optimizer"].state[p]["exp_avg"].full_tensor() for p in before["model"].parameters()
    ]
    assert_equal_state(after, theirs, moments)


def test_the_guide_names_all_that_torch_exports_for_fully_shard() -> None:
    fsdp1 = {"FullyShardedDataParallel", "MixedPrecision", "CPUOffload", "BackwardPrefetch"}
    names = {
        name
        for name in torch.distributed.fsdp.__all__
        if name not in fsdp1 and not name.startswith(("Full", "Local", "Optim", "Shard", "State"))
    }
    assert len(names) >= 7
    assert_named("from_torch_fsdp2.md", names)


# ------------------------------------------------------------------------------------------ ZeRO


@distributed(2)
@in_one_folder()
def test_what_replaces_zero_has_the_losses_of_ddp() -> None:
    """DeepSpeed is not there to be run: DDP trains the same model, in float32."""
    after = run("from_zero.md", "After")
    ddp = Losses()
    model = Model()
    model.load_state_dict(initial_weights())
    run("from_ddp.md", "Before", Model=lambda: model, loss_fn=ddp)
    assert after["loss_fn"].values == pytest.approx(ddp.values, rel=2e-2)


def initial_weights() -> dict[str, Tensor]:
    """As `materialize` makes them."""
    model = Model()
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model.state_dict()


@distributed(2)
@in_one_folder()
def test_a_universal_checkpoint_of_zero_is_gone_on_from() -> None:
    """Written here as DeepSpeed's ds_to_universal.py does: a file of each kind per parameter."""
    torch.manual_seed(3)
    whole = {name: torch.randn(param.shape) for name, param in Model().named_parameters()}
    moments = {name: torch.rand(tensor.shape) for name, tensor in whole.items()}
    if dist.get_rank() == 0:
        for name, tensor in whole.items():
            folder = Path("universal/zero", name)
            folder.mkdir(parents=True)
            for kind, value in (
                ("fp32", tensor),
                ("exp_avg", moments[name]),
                ("exp_avg_sq", moments[name]),
            ):
                torch.save({"param": value}, folder / f"{kind}.pt")
    dist.barrier()
    after = run("from_zero.md", "After", num_steps=0)
    run("from_zero.md", "Resuming from a DeepSpeed checkpoint", **after)
    assert_equal_state(after, whole, list(moments.values()))
    steps = {state["step"].item() for state in after["optimizer"].state.values()}
    assert steps == {3.0}
    assert [group["lr"] for group in after["optimizer"].param_groups] == [1e-2]


# Blocks that no test runs.
NOT_RUN = {("from_zero.md", "Before"): "DeepSpeed has to be built for the machine"}


def test_every_block_of_the_guides_is_run_or_named() -> None:
    source = Path(__file__).read_text()
    for page in sorted(GUIDES.glob("from_*.md")):
        for block in blocks(page):
            assert block.language == "python"
            where = (page.name, block.heading)
            assert where in NOT_RUN or f'run("{page.name}", "{block.heading}"' in source, where
