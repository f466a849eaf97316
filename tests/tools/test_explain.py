"""`explain`: its numbers are those of a real step, and the same before anything is sharded."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import harness
from harness import cached_mesh, distributed
from models import BY_NAME, Case

pytestmark = harness.ours_only("explain")

if not harness.RUNS_ON_TORCH:
    from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, explain, fully_shard, shard_model
    from fsdp2.describe.explanation import Explanation, UnitReport
    from fsdp2.planning import Sharding
    from fsdp2.runtime.unit import units_in
    from traffic import counting, held_by

BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
CASES = ["mlp", "transformer", "nested", "lora", "recurrent", "conditional"]


def mesh_for(strategy: str) -> tuple[Any, Any]:
    """A mesh of this world, and its shape."""
    size = dist.get_world_size()
    if strategy == "hybrid":
        shape = {2: (1, 2), 4: (2, 2)}[size]
        return cached_mesh(*shape, names=("replicate", "shard")), shape
    return cached_mesh(size), size


def wrap_of(case: Case) -> list[str]:
    model = case.build()
    units = case.units(model)
    return [name for name, module in model.named_modules() if module in units]


def differing(found: Explanation, expected: Explanation) -> list[Any]:
    """Where they are not equal: unit, field, both values."""
    return [
        (unit.name, name, value, getattr(other, name))
        for unit, other in zip(found.units, expected.units, strict=True)
        for name, value in vars(unit).items()
        if value != getattr(other, name)
    ]


def unit_of(explanation: Explanation, name: str) -> UnitReport:
    (unit,) = (unit for unit in explanation.units if unit.name == name)
    return unit


def train(case: Case, model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(steps):
        case.loss(model, *case.batch(step, dist.get_rank(), torch.float32)).backward()
        optimizer.step()
        optimizer.zero_grad()


# -- against a real step ---------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["full", "grad", "none", "hybrid"])
@distributed(4, long=(2,))
def test_communication_is_what_a_step_sends(strategy: str) -> None:
    mesh, _ = mesh_for(strategy)
    for name in ("mlp", "transformer", "recurrent"):
        for policy in ({}, BF16):
            case = BY_NAME[name]
            model = shard_model(
                case.build(),
                mesh,
                strategy=strategy,
                wrap=wrap_of(case),
                mp_policy=MixedPrecisionPolicy(**policy),
                direct_min_bytes=300,
                replicate_below=40,
            )
            before = explain(model)
            train(case, model, 2)
            with counting() as traffic:
                train(case, model, 1)
            totals = explain(model).totals
            # Where ranks are is known from the first forward of a mesh on. (All send messages to
            # all, and count as hosts of their own, where none may read the memory of another one.)
            assert totals.sent_between_hosts in (0, totals.sent_bytes)
            was = replace(before.totals, sent_between_hosts=totals.sent_between_hosts)
            assert totals == was, name
            assert totals.sent_by_gathers == traffic.gathered, name
            assert totals.sent_by_reduction == traffic.reduced, name
            assert totals.sent_by_all_reduction == traffic.all_reduced, name
            assert totals.sent_bytes == traffic.total


@distributed(4)
def test_communication_of_resharding_to_fewer_ranks() -> None:
    case = BY_NAME["transformer"]
    mesh, _ = mesh_for("full")
    model = case.build()
    for block in case.units(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=2, direct_min_bytes=300)
    fully_shard(model, mesh=mesh, direct_min_bytes=300)
    train(case, model, 2)
    with counting() as traffic:
        train(case, model, 1)
    assert explain(model).totals.sent_by_gathers == traffic.gathered
    assert unit_of(explain(model), "blocks.0").reshard_after_forward == 2


@pytest.mark.parametrize("policy", [{}, BF16], ids=["fp32", "bf16"])
@distributed(4, long=(2,))
def test_bytes_are_what_a_rank_holds(policy: dict[str, Any]) -> None:
    for strategy in ("full", "none", "hybrid"):
        for name in CASES:
            mesh, _ = mesh_for(strategy)
            model = shard_model(
                BY_NAME[name].build(),
                mesh,
                strategy=strategy,
                mp_policy=MixedPrecisionPolicy(**policy),
                wrap=wrap_of(BY_NAME[name]),
            )
            found = explain(model)
            for unit in units_in(model):
                unit.modules[0].unshard()  # type: ignore[operator]
            held = held_by(model)
            assert found.totals.sharded_bytes == held.shards, name
            assert found.totals.gathered_bytes == held.gathered, name
            padding = torch.tensor(held.shards - sum(p.to_local().nbytes for p in params_of(model)))
            dist.all_reduce(padding)
            assert found.totals.padding_bytes == padding.item(), name


def params_of(model: nn.Module) -> list[Any]:
    return [param.sharded for unit in units_in(model) for param in unit.params]


# -- before sharding -------------------------------------------------------------------------------


def without_places(found: Explanation) -> Explanation:
    return replace(
        found,
        units=tuple(replace(unit, sent_between_hosts=None) for unit in found.units),
        totals=replace(found.totals, sent_between_hosts=None),
    )


@pytest.mark.parametrize("strategy", ["full", "grad", "optimizer", "none", "hybrid"])
@distributed(4, long=(2,))
def test_a_model_that_is_not_sharded_gives_the_same(strategy: str) -> None:
    mesh, shape = mesh_for(strategy)
    for name in CASES:
        for policy in ({}, BF16):
            options: dict[str, Any] = {
                "strategy": strategy,
                "mp_policy": MixedPrecisionPolicy(**policy),
                "wrap": wrap_of(BY_NAME[name]) if name != "transformer" else "auto",
                "replicate_below": 40,
                "direct_min_bytes": 200,
            }
            with torch.device("meta"):
                described = explain(
                    BY_NAME[name].build(), shape, device_type="cpu", ranks_per_node=4, **options
                )
                model = shard_model(BY_NAME[name].build(), mesh, **options)
            found = explain(model)
            if found.totals.sent_between_hosts != 0:  # not known before the first forward
                found, described = without_places(found), without_places(described)
            assert found.to_dict() == described.to_dict(), differing(found, described)


def test_any_number_of_ranks_without_processes() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    found = explain(model, (128, 128), strategy="hybrid")
    assert found.totals.num_ranks == 16384
    first = unit_of(found, "0")
    whole = 4 * 1024 * 1024
    assert first.sharded_bytes == whole // 128
    assert first.sent_by_gathers == 2 * whole * 127 // 128
    assert first.sent_by_reduction == whole * 127 // 128
    assert first.sent_by_all_reduction == 2 * (whole // 128) * 127 // 128
    assert unit_of(found, "3").sent_by_gathers == whole * 127 // 128, "the last one is kept"
    assert first.padding_bytes == 0
    uneven = explain(nn.Linear(7, 13), 4, wrap="root")
    # 13 rows are 4 + 4 + 4 + 1, and the pack of a rank is filled up to 16 bytes.
    assert uneven.totals.padding_bytes == 4 * (4 * 7 + 4) * 4 - (13 * 7 + 13) * 4


def test_what_is_frozen() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    found = explain(model, 4, wrap=nn.Linear)
    assert [unit_of(found, str(i)).num_gathers for i in range(4)] == [1, 2, 2, 1]
    assert [unit_of(found, str(i)).sent_by_reduction > 0 for i in range(4)] == [False, True] * 2
    assert found.totals.trained_numel == found.totals.numel // 2


@distributed(2)
def test_frozen_parameters_that_are_kept() -> None:
    """They are gathered once for all steps, so a step sends what is trained."""
    case = BY_NAME["lora"]
    mesh, _ = mesh_for("full")
    model = shard_model(case.build(), mesh, wrap=wrap_of(case), direct_min_bytes=0)
    before = explain(model).totals.sent_by_gathers
    model.set_keep_frozen_gathered()
    train(case, model, 2)
    with counting() as traffic:
        train(case, model, 1)
    found = explain(model).totals.sent_by_gathers
    assert found == traffic.gathered
    assert 0 < found < before


# -- what was set ----------------------------------------------------------------------------------


@distributed(2)
def test_what_was_set_by_hand() -> None:
    case = BY_NAME["transformer"]
    mesh, _ = mesh_for("full")
    model = case.build()
    blocks: Any = case.units(model)
    bf16 = MixedPrecisionPolicy(**BF16, output_dtype=torch.float32)
    fully_shard(blocks[0], mesh=mesh, mp_policy=bf16, direct_min_bytes=0)
    fully_shard(blocks[1], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    blocks[0].set_modules_to_forward_prefetch([blocks[1]])
    blocks[1].set_reshard_after_backward(False)
    found = explain(model)
    assert found.strategy is None
    first, second = unit_of(found, "blocks.0"), unit_of(found, "blocks.1")
    assert (first.stored_dtypes, first.compute_dtypes) == (("float32",), ("bfloat16",))
    assert first.reduce_dtypes == ("float32",)
    assert first.forward_prefetch == ("blocks.1",)
    assert first.backward_prefetch is None
    assert all(p.placements == ("Shard(0)",) for p in first.params)
    assert {p.name: p.shape for p in first.params}["blocks.0.qkv.weight"] == (36, 12)
    assert [p.direct for p in first.params if p.name.endswith("qkv.weight")] == [True]
    assert not any(p.direct for p in second.params)
    assert (first.reshard_after_forward, second.reshard_after_forward) == (True, False)
    assert (first.reshard_after_backward, second.reshard_after_backward) == (True, False)
    assert (first.num_gathers, second.num_gathers) == (2, 1)
    assert found.units[0].is_root
    assert found.units[0].offload
    assert not first.offload
    assert found.order == ()
    train(case, model, 1)
    assert explain(model).order == ("(root)", "blocks.0", "blocks.1")


# -- as text and as data ---------------------------------------------------------------------------

TABLE = """\
7 units, 29,251 parameters (29,251 trained) on 4 ranks, strategy 'full'

unit            parameters  mesh      reshard  direct   sharded  padding  gathered      gathers   reduces
(root)                   0  4 shards  no       0 of 0       0 B      0 B       0 B            -       0 B
0                    4,096  4 shards  yes      1 of 1  4.00 KiB      0 B  16.0 KiB  1x 12.0 KiB  12.0 KiB
1.0 .. 1.3 (4)       4,160  4 shards  yes      1 of 2  4.06 KiB      0 B  16.5 KiB  2x 24.4 KiB  12.2 KiB
2                    8,515  4 shards  yes      1 of 2  8.39 KiB    308 B  34.3 KiB  1x 25.2 KiB  25.2 KiB
total               29,251                             28.6 KiB    308 B   116 KiB      135 KiB  85.9 KiB
"""  # noqa: E501


def language_model() -> nn.Module:
    blocks = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    return nn.Sequential(nn.Embedding(64, 64), blocks, nn.Linear(64, 131, bias=True))


def test_as_text() -> None:
    options = {"wrap": [nn.Embedding, nn.Linear], "direct_min_bytes": 1024}
    text = str(explain(language_model(), 4, **options))
    assert text.startswith(TABLE), text
    assert "Dtypes, stored > computed > reduced: float32 > float32 > float32" in text
    assert "No forward has run" in text
    hybrid = explain(language_model(), (2, 2), strategy="hybrid", reshard_after_forward=False)
    assert "2 replicas x 2 shards  no" in str(hybrid)
    assert "are all-reduced over replicas" in str(hybrid)


def test_as_data() -> None:
    found = explain(language_model(), 4)
    data = found.to_dict()
    assert json.loads(found.to_json()) == data
    assert data["strategy"] == "full"
    assert [unit["name"] for unit in data["units"]] == [unit.name for unit in found.units]
    assert data["units"][1]["params"][0]["name"] == "0.weight"
    assert data["totals"]["numel"] == sum(p.numel() for p in language_model().parameters())


@distributed(1)
def test_models_that_cannot_be_explained() -> None:
    model = language_model()
    with pytest.raises(ValueError, match="The model is not sharded: call shard_model"):
        explain(model)
    for shape in (0, (1, 2, 3), (2, 0), "4"):
        with pytest.raises(ValueError, match="mesh_shape must be a number of ranks"):
            explain(model, shape)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'hybrid' needs a mesh_shape of \(replicas, shards\)"):
        explain(model, 4, strategy="hybrid")
    shard_model(model, cached_mesh(1))
    with pytest.raises(ValueError, match="The model is already sharded"):
        explain(model, 4)


def test_a_sharding_says_what_its_fields_say_and_fields_come_first() -> None:
    sharding = Sharding("hybrid", wrap="root", replicate_below=2**20)
    by_name = {"strategy": "hybrid", "wrap": "root", "replicate_below": 2**20}
    model = language_model()
    assert explain(model, (2, 2), sharding) == explain(model, (2, 2), **by_name)
    found = explain(model, 4, sharding, strategy="grad")
    assert found == explain(model, 4, **(by_name | {"strategy": "grad"}))
    with pytest.raises(TypeError, match=r"sharding must be a Sharding.*got 'grad'"):
        explain(model, 4, "grad")  # type: ignore[arg-type]
    for given in ({}, {"mesh_shape": 4}):
        with pytest.raises(TypeError, match="no field 'strategi': did you mean 'strategy'"):
            explain(model, **given, strategi="grad")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["max_device_bytes", "shard_granularity"])
def test_what_shows_in_a_sharded_model_only_is_refused_before(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} shows in the sharded model only"):
        explain(language_model(), 4, **{name: 1})
