"""`plan` for ranks of different speeds: how the batch is divided, and what that gains."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not plan", allow_module_level=True)

from by_keywords import plan
from fsdp2 import split_batch
from fsdp2.cli.main import main
from fsdp2.planning import Plan, find_hardware

H100 = find_hardware("h100")


def model(width: int = 1024) -> nn.Module:
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)]
        return nn.Sequential(*blocks)


def planned(speeds: Sequence[float], samples: int = 4096, **options: Any) -> Plan:
    hardware = options.pop("hardware", H100)
    batch = torch.empty(samples, 1024, device="meta")
    options = {"activation_checkpointing": ("none",), **options}
    return plan(model(), batch, replace(hardware, speeds=speeds), 16, **options)


@pytest.fixture(scope="module")
def even() -> Plan:
    """All ranks are equally fast."""
    return planned([])


@pytest.fixture(scope="module")
def uneven() -> Plan:
    """One of two hosts has half the speed."""
    return planned([1.0, 0.5])


def test_a_host_of_half_the_speed_gets_half_the_samples(even: Plan, uneven: Plan) -> None:
    made = uneven
    assert even.split is None
    assert made.split is not None
    fast, slow = made.split.sizes[0], made.split.sizes[-1]
    assert made.split.sizes == [fast] * 8 + [slow] * 8
    assert (sum(made.split.sizes), fast) == (16 * 4096, 2 * slow - (2 * slow - fast))
    assert abs(fast - 2 * slow) <= 2
    assert split_batch(16 * 4096, made.split.speeds) == made.split.sizes
    # Even: as slow as the slow host. Divided: four thirds of the samples at the full speed.
    assert made.split.even_s == pytest.approx(planned([0.5, 0.5]).chosen.seconds)
    assert even.chosen.seconds < made.chosen.seconds < 0.8 * made.split.even_s
    assert f"Samples        {fast} on ranks 0 to 7, {slow} on ranks 8 to 15" in str(made)
    assert "Samples: by speed; 4096 on each rank is " in str(made)
    assert json.loads(json.dumps(made.to_dict()))["split"]["sizes"] == made.split.sizes


def test_speeds_of_ranks_and_of_nodes_are_the_same_thing() -> None:
    by_node, by_rank = planned([1.0, 0.25]), planned([1.0] * 8 + [0.25] * 8)
    assert by_node.split == by_rank.split
    with pytest.raises(ValueError, match="has 3 speeds, but there are 2 nodes with 8 ranks each"):
        planned([1.0, 1.0, 0.5])
    with pytest.raises(ValueError, match=r"speeds\[1\] must be positive and finite, got 0"):
        planned([1.0, 0.0])
    with pytest.raises(ValueError, match=r"speeds\[0\] must be positive and finite, got nan"):
        planned([math.nan, 1.0])


def test_equally_slow_ranks_are_only_slower(even: Plan) -> None:
    slow = planned([0.5, 0.5])
    assert slow.split is None
    # (Not exactly twice as long: collectives take multiprocessors from it for as long as before.)
    assert slow.step.compute_s == pytest.approx(2 * even.step.compute_s, rel=0.02)


def test_the_memory_of_the_rank_with_most_samples_counts(even: Plan, uneven: Plan) -> None:
    made = uneven
    assert made.split is not None
    alone = planned([], samples=made.split.sizes[0])
    same = next(o for o in alone.outcomes if o.candidate == made.chosen.candidate)
    assert made.chosen.peak_bytes == same.peak_bytes
    assert made.chosen.peak_bytes > even.chosen.peak_bytes
    # Where that does not fit, the batch stays as it was, and the plan says why.
    only_tensors = replace(
        H100, context_bytes=0, workspace_bytes=0, channel_bytes=0, caches_memory=False
    )
    budget = made.chosen.peak_bytes * 0.9
    kept = planned([1.0, 0.5], memory_budget=budget, hardware=only_tensors)
    assert kept.split is None
    assert "Samples: 4096 on each rank; by speed (" in str(kept)
    assert "does not work: Nothing fits into" in str(kept)


def test_what_gains_nothing_is_not_chosen() -> None:
    """Where a step is communication, samples do not matter."""
    slow = replace(H100, network_bandwidth=1e7)
    made = planned([1.0, 0.9], samples=64, hardware=slow)
    assert made.split is None
    assert "Samples: 64 on each rank; by speed (" in str(made)
    one = planned([1.0, 0.5], samples=1)
    assert one.split is None
    assert "with so few the speeds of ranks make no difference" in str(one)


def test_a_loss_that_expects_a_number_of_samples_keeps_the_batch() -> None:
    def loss(output: Tensor) -> Tensor:
        return (output - torch.zeros(4096, 1024)).square().mean()

    made = planned([1.0, 0.5], loss_fn=loss)
    assert made.split is None
    assert "the model fails: " in str(made)


def test_what_all_samples_share_is_not_divided() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            assert mask.shape == (64, 64)
            return self.linear(x) @ mask

    with torch.device("meta"):
        inputs = {"x": torch.empty(4096, 64), "mask": torch.empty(64, 64)}
        options: Any = {"activation_checkpointing": ("none",)}
        made = plan(Masked(), inputs, replace(H100, speeds=[1, 0.1]), 16, **options)
    assert made.reasons[-1].startswith("Samples: ")
    assert "fails" not in made.reasons[-1]
    with pytest.raises(ValueError, match="no tensor whose dim 0"):
        plan(model(), (), replace(H100, speeds=[1, 0.1]), 16, **options)


def test_hardware_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ours.json"
    file.write_text('{"base": "h100", "network_bandwidth": 5e10, "speeds": [1, 0.5]}')
    made = find_hardware(str(file))
    assert made == replace(H100, name="ours", network_bandwidth=5e10, speeds=(1.0, 0.5))
    fields = {
        name: getattr(H100, name)
        for name in ("memory_bytes", "matmul_efficiency", "attention_flops", "memory_bandwidth",
                     "node_bandwidth", "network_bandwidth", "host_bandwidth")
    }  # fmt: skip
    flops = {str(dtype).removeprefix("torch."): f for dtype, f in H100.matmul_flops.items()}
    fields |= {"name": "h100", "matmul_flops": flops}
    fields |= {name: [*getattr(H100, name)] for name in ("kernels_range", "links_range")}
    file.write_text(json.dumps(fields))
    assert find_hardware(str(file)) == H100


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "is not JSON"),
        ("[1]", "one object"),
        ('{"base": "h10"}', "base: there is no preset 'h10': did you mean 'h100'"),
        ('{"base": "h100", "sped": [1]}', "no field 'sped': did you mean 'speeds'?"),
        ('{"base": "h100", "speeds": [1, "2"]}', "speeds has to be a list of numbers"),
        ('{"base": "h100", "speeds": [1, -2]}', r"speeds\[1\] must be positive"),
        ('{"base": "h100", "network_bandwidth": "1"}', "network_bandwidth has to be a number"),
        ('{"base": "h100", "channels": 1.5}', "channels has to be a whole number"),
        ('{"base": "h100", "matmul_flops": {"bf17": 1}}', "there is no dtype 'bf17'"),
        ('{"memory_bytes": 1}', "has no attention_flops, "),
    ],
)
def test_files_that_are_not_hardware(text: str, match: str, tmp_path: Path) -> None:
    file = tmp_path / "ours.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=match):
        find_hardware(str(file))


MODELS = """
import torch
from torch import nn

def model():
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(3)])

def batch():
    return torch.zeros(4096, 1024)
"""


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = tmp_path / "uneven_models.py"
    code.write_text(MODELS)
    file = tmp_path / "ours.json"
    file.write_text('{"base": "h100", "speeds": [1, 1, 0.5]}')
    fixed = ("--checkpointing", "none", "--strategy", "full", "--wrap", "root")
    start = ["plan", f"{code}:model", "--input", f"{code}:batch", "--world-size", "24", *fixed]
    start.append("--json")
    told = []
    for options in (["h100", "--speeds", "1x2,0.5"], [str(file)]):
        assert main([*start, "--hardware", *options]) == 0
        told.append(json.loads(capsys.readouterr().out)["split"])
    assert told[0] == told[1]
    assert told[0]["speeds"] == [1.0] * 16 + [0.5] * 8
    assert main([*start, "--hardware", "h100", "--speeds", "1,fast"]) == 2
    assert "is not a list of speeds" in capsys.readouterr().err
    assert main([*start, "--hardware", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err
