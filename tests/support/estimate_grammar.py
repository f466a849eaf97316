"""Random configurations of a step: what is drawn, and the arguments that it stands for.

The models are those of random programs (`random_models`), with larger parameters: beside them, what
is live for a moment comes to less than the tolerance of a comparison.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any
from unittest import mock

import torch

import fsdp2
import random_models
from random_models import Layer, Node, all_layers, build, layers, nodes, style

WIDTH = 48
SIZES = (1, 2, 5, 7, 16, 48, 64, 96, 150, 200)
BATCHES = (1, 3, 8, 32)

bf16, fp32, fp64 = torch.bfloat16, torch.float32, torch.float64
PRECISIONS = (
    fsdp2.MixedPrecisionPolicy(bf16, fp32),
    fsdp2.MixedPrecisionPolicy(bf16),
    fsdp2.MixedPrecisionPolicy(bf16, bf16, fp32),
    fsdp2.MixedPrecisionPolicy(fp32, fp64, fp64),
    fsdp2.MixedPrecisionPolicy(None, fp32),
    fsdp2.MixedPrecisionPolicy(fp32, cast_frozen_params=True),
)
COMM_POLICIES = (
    fsdp2.CommPolicy(gather=bf16),
    fsdp2.CommPolicy(gather=torch.int8, reduce=torch.int8, block=16),
    fsdp2.CommPolicy(reduce=bf16, error_feedback=True),
    fsdp2.CommPolicy(reduce=torch.int8, ranks_per_node=2, block=64),
    fsdp2.CommPolicy(gather=torch.float8_e4m3fn, secondary=torch.int8),
)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A model, a mesh, and how a step is made.

    Attributes:
        shared: arguments that `shard_model` and `estimate` have in common.
        checkpointing, checkpointed: the mode, and the names of the modules; None: the default ones.
        batch: rows of a micro-batch.
        needs_grad: whether the input needs a gradient.
        loss: "sum", which is what `estimate` takes without a loss, or "square".
    """

    model: Layer
    mesh: tuple[int, ...]
    shared: dict[str, Any]
    checkpointing: str = "none"
    checkpointed: tuple[str, ...] | None = None
    micro_batches: int = 1
    accumulation: str = "unsharded"
    optimizer: str | None = "adamw"
    batch: int = 8
    needs_grad: bool = False
    loss: str = "sum"

    @property
    def world_size(self) -> int:
        return torch.Size(self.mesh).numel()


def named_nodes(model: Node) -> list[str]:
    """Names of all nodes below the root, outer ones first."""
    below = set(nodes(model))
    return [name for name, module in model.named_modules() if module in below]


def _wrap(chance: random.Random, model: Node) -> Any:
    names = named_nodes(model)
    kind = chance.choice(["auto", "root", "size", "class", "list", "list", "list"])
    if kind == "size":
        return f"size:{chance.choice([1000, 20_000, 100_000])}"
    if kind == "class":
        return "class:Node" if names else "root"
    if kind != "list" or not names:
        return kind if kind != "list" else "root"
    chosen = [name for name in names if chance.random() < 0.7]
    found: list[Any] = list(chosen)
    siblings = [name for name in chosen if name.count(".") == 1]
    if len(siblings) > 1 and chance.random() < 0.3:
        found = [name for name in chosen if name not in siblings[:2]] + [tuple(siblings[:2])]
    return found


def _reshard(chance: random.Random, shards: int) -> Any:
    return chance.choice([None, None, True, False, *(n for n in (1, 2) if shards % n == 0)])


def configuration(chance: random.Random) -> Configuration:
    model = dataclasses.replace(
        layers(2, {**style(chance), "size": lambda c: c.choice(SIZES)})(chance),
        skipped=None,
        kind="linear",
        detached=False,
        frozen=False,
        writes="",
    )
    mesh = chance.choice([(2,), (2,), (3,), (4,), (2, 2)])
    strategy = chance.choice(["full", "full", "grad", "optimizer", "none"])
    if len(mesh) > 1 and chance.random() < 0.7:
        strategy = "hybrid"
    with scaled():
        made = build(model)
        wrap = _wrap(chance, made)
        names = named_nodes(made)
    precision = fsdp2.MixedPrecisionPolicy()
    if not any(layer.kind == "batchnorm" for layer in all_layers(model)):
        precision = chance.choice([precision] * 4 + list(PRECISIONS))
    shared: dict[str, Any] = {"strategy": strategy, "wrap": wrap, "mp_policy": precision}
    if chance.random() < 0.5:
        shared["reshard_after_forward"] = _reshard(chance, mesh[-1])
    if chance.random() < 0.3:
        shared["prefetch"] = chance.choice([1, 2, 3])
    if chance.random() < 0.3:
        shared["replicate_below"] = chance.choice([100, 2000, 30_000])
    if chance.random() < 0.3:
        shared["shard_granularity"] = chance.choice([2, 3, 7, 32])
    if chance.random() < 0.4:
        shared["direct_min_bytes"] = chance.choice([0, 1000, 10_000, 1 << 30])
    if chance.random() < 0.15:
        shared["comm_policy"] = chance.choice(COMM_POLICIES)
    if chance.random() < 0.15:
        shared["max_gathered_bytes"] = chance.choice([100_000, 300_000, 1_000_000])
    if chance.random() < 0.1:
        shared["offload_policy"] = fsdp2.CPUOffloadPolicy(pin_memory=False)
        if chance.random() < 0.5:
            shared["max_device_bytes"] = chance.choice([0, 50_000])
    checkpointing = chance.choice(["none", "none", "none", "full", "selective"])
    checkpointed = None
    if checkpointing != "none" and names and chance.random() < 0.7:
        outer = [name for name in names if name.count(".") == 1]
        checkpointed = tuple(name for name in outer if chance.random() < 0.7)
    micro_batches = chance.choice([1, 1, 2, 3])
    accumulation = chance.choice(["unsharded", "sharded", "every"])
    if micro_batches > 1 and accumulation != "every":
        model = without_reentrant(model)
    return Configuration(
        model,
        mesh,
        shared,
        checkpointing,
        checkpointed,
        micro_batches,
        accumulation if micro_batches > 1 else "unsharded",
        chance.choice(["adamw", "sgd", "momentum"]),
        chance.choice(BATCHES),
        micro_batches == 1 and chance.random() < 0.3,
        chance.choice(["sum", "square"]),
    )


def without_reentrant(layer: Layer) -> Layer:
    """The same model, whose reentrant checkpoints are not.

    A run reduces what it added up in them once more than is predicted, before the last micro-batch.
    """
    inside = tuple(map(without_reentrant, layer.inside))
    recomputed = True if layer.recomputed == "reentrant" else layer.recomputed
    return dataclasses.replace(layer, recomputed=recomputed, inside=inside)


def sample(num: int, first: int = 0) -> list[Configuration]:
    """So many configurations, others for each ``first`` seed."""
    return [configuration(random.Random(f"{first}/{number}")) for number in range(num)]


def scaled() -> Any:
    """A context in which layers have `WIDTH` columns."""
    return mock.patch.object(random_models, "WIDTH", WIDTH)
