"""Lightning's `ModelParallelStrategy` with our `fully_shard`: the import is all that changes.

The strategy runs on the CPU as it is. All that a test has to tell it is that the processes are
there already, which a `ClusterEnvironment` is for.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import FSDPModule, fully_shard
from harness import distributed
from models import TRANSFORMER, token_batch, token_loss
from reference import assert_same_parameters, average_gradients

pytestmark = pytest.mark.skipif(
    find_spec("lightning") is None, reason="trains with lightning's ModelParallelStrategy"
)

NUM_STEPS = 3
CLIP = 0.5


class Batches:
    """A data loader: this rank's batches."""

    def __init__(self, first_step: int) -> None:
        steps = range(first_step, first_step + NUM_STEPS)
        self.batches = [token_batch(step, dist.get_rank(), torch.float64) for step in steps]

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def build() -> nn.Module:
    torch.manual_seed(0)
    return TRANSFORMER.build().double()


def lightning_module() -> Any:
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build()

        def configure_model(self) -> None:
            if isinstance(self.model, FSDPModule):
                return
            mesh = self.device_mesh["data_parallel"]
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return token_loss(self.model, *batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Module()


def trainer(num_epochs: int, whole_checkpoint: bool) -> Any:
    import lightning.pytorch as lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy

    class StartedByOthers(LightningEnvironment):
        """The process group of the tests."""

        creates_processes_externally = True  # type: ignore[assignment]

        def world_size(self) -> int:
            return dist.get_world_size()

        def global_rank(self) -> int:
            return dist.get_rank()

        def local_rank(self) -> int:
            return dist.get_rank()

        def set_world_size(self, size: int) -> None:
            assert size == dist.get_world_size()

        def set_global_rank(self, rank: int) -> None:
            assert rank == dist.get_rank()

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    strategy = ModelParallelStrategy(
        data_parallel_size=dist.get_world_size(),
        tensor_parallel_size=1,
        save_distributed_checkpoint=not whole_checkpoint,
        process_group_backend="gloo",
    )
    return lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        plugins=[StartedByOthers()],
        max_epochs=num_epochs,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, first_step: int) -> None:
    for batch in Batches(first_step):
        token_loss(model, *batch).backward()
        average_gradients(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        assert norm > CLIP  # it does clip
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "whole_checkpoint", [False, pytest.param(True, marks=pytest.mark.long)], ids=["shards", "whole"]
)
@distributed(2)
def test_fit_clip_save_and_go_on(whole_checkpoint: bool) -> None:
    """As the plain loop, also after a checkpoint has been loaded into a new trainer."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    path = Path(folder[0], "checkpoint")
    plain = build()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, module = trainer(1, whole_checkpoint), lightning_module()
        first.fit(module, Batches(0))
        train_plain(plain, optimizer, 0)
        assert isinstance(module.model, FSDPModule)
        assert_same_parameters(module.model, plain)
        first.save_checkpoint(path)
        second, resumed = trainer(2, whole_checkpoint), lightning_module()
        second.fit(resumed, Batches(NUM_STEPS), ckpt_path=path)
        train_plain(plain, optimizer, NUM_STEPS)
        assert second.global_step == 2 * NUM_STEPS
        assert_same_parameters(resumed.model, plain)
    assert path.is_file() == whole_checkpoint
