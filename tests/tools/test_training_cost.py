"""`training_cost`: days and money to a number of tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not predict", allow_module_level=True)

from by_keywords import predict, sweep
from fsdp2 import MixedPrecisionPolicy
from fsdp2.cli.main import main
from fsdp2.planning import Sweep, find_hardware, training_cost

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 1024)
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(6))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return x


def swept(hardware: Any = "h100", num_ranks: Any = None, **options: Any) -> Sweep:
    with torch.device("meta"):
        model, tokens = Model(), torch.empty(4, 1024, dtype=torch.long)
    num_ranks = num_ranks or [8, 64, 512]
    return sweep(model, tokens, hardware, num_ranks, mp_policy=BF16, **options)


@cache
def table() -> Sweep:
    return swept()


def test_days_and_money_are_those_of_the_tokens() -> None:
    made = training_cost(table(), tokens=1e12, price_per_gpu_hour=2.0)
    assert [offer.prediction.num_ranks for offer in made.offers] == [8, 64, 512]
    for offer in made.offers:
        prediction = offer.prediction
        steps = 1e12 / (4 * 1024 * prediction.num_ranks)
        assert offer.batch_tokens == 4 * 1024 * prediction.num_ranks
        assert offer.days == pytest.approx(steps * prediction.seconds / 86400)
        assert offer.gpu_hours == pytest.approx(offer.days * 24 * prediction.num_ranks)
        assert offer.cost == pytest.approx(2 * offer.gpu_hours)
        assert offer.efficiency == pytest.approx(prediction.flops_per_s / 989e12)
        assert 0 < offer.efficiency < 0.7
    with_faults = training_cost(table(), tokens=1e12, price_per_gpu_hour=2.0, goodput=0.8)
    for offer, later in zip(made.offers, with_faults.offers, strict=True):
        assert later.days == pytest.approx(offer.days / 0.8)
        assert later.cost == pytest.approx(offer.cost / 0.8)


def test_efficiency_is_of_the_dtype_of_computation() -> None:
    """Without a policy it is that of the parameters."""
    with torch.device("meta"):
        model, tokens = Model().bfloat16(), torch.empty(4, 1024, dtype=torch.long)
        wide = Model()
    for each, peak in ((model, 989e12), (wide, 494e12)):
        made = training_cost([predict(each, tokens, "h100", 8)], 1e12, 2.0).offers[0]
        assert made.efficiency == pytest.approx(made.prediction.flops_per_s / peak)


def test_the_choices() -> None:
    made = training_cost(table(), tokens=1e12, price_per_gpu_hour=2.0)
    few, some, many = made.offers
    # More GPUs lose more time to communication, so each of these is right for somebody.
    assert few.days > some.days > many.days
    assert few.cost < some.cost < many.cost
    assert all(offer.best for offer in made.offers)
    assert (made.cheapest, made.fastest) == (few, many)
    assert made.within(days=few.days) == few
    assert made.within(days=(few.days + some.days) / 2) == some
    assert made.within(cost=(some.cost + many.cost) / 2) == some
    assert made.within(days=many.days, cost=few.cost) is None
    assert made.within(days=few.days, cost=many.cost) == few
    assert made.within(days=many.days / 2) is None
    assert made.best_number(some.cost / few.cost - 1) == some
    assert made.best_number(0) == few
    assert made.best_number(100) == many


def test_kinds_of_gpus_with_prices_of_their_own() -> None:
    slow = replace(find_hardware("h100"), name="slow", matmul_efficiency=0.1, attention_flops=1e12)
    both = [table(), swept(slow)]
    made = training_cost(both, tokens=1e12, price_per_gpu_hour={"h100": 2.0, "slow": 3.0})
    assert [o.prediction.hardware.name for o in made.offers] == ["h100"] * 3 + ["slow"] * 3
    assert [o.best for o in made.offers] == [True] * 3 + [False] * 3
    cheap = training_cost(both, tokens=1e12, price_per_gpu_hour={"h100": 2.0, "slow": 0.1})
    assert cheap.cheapest.prediction.hardware.name == "slow"
    with pytest.raises(KeyError, match="no price of 'slow'"):
        training_cost(both, tokens=1e12, price_per_gpu_hour={"h100": 2.0})


def test_what_is_left_out() -> None:
    most = 4 * 1024 * 64
    made = training_cost(table(), tokens=1e12, price_per_gpu_hour=2.0, max_batch_tokens=most)
    assert [offer.prediction.num_ranks for offer in made.offers] == [8, 64]
    assert "1 configuration have more than max_batch_tokens" in str(made)
    small = swept(memory_budget=1e9)
    with pytest.raises(ValueError, match="No configuration is left: 3 do not fit into memory"):
        training_cost(small, tokens=1e12, price_per_gpu_hour=2.0)
    with pytest.raises(ValueError, match="there are no predictions"):
        training_cost([], tokens=1e12, price_per_gpu_hour=2.0)


@pytest.mark.parametrize(("name", "value", "error"), [
    ("tokens", 0, ValueError),
    ("tokens", "1T", TypeError),
    ("price_per_gpu_hour", -1.0, ValueError),
    ("price_per_gpu_hour", float("nan"), ValueError),
    ("goodput", 1.5, ValueError),
    ("goodput", 0.0, ValueError),
    ("max_batch_tokens", 0, ValueError),
])  # fmt: skip
def test_numbers_that_are_none(name: str, value: Any, error: type[Exception]) -> None:
    given = {"tokens": 1e12, "price_per_gpu_hour": 2.0} | {name: value}
    with pytest.raises(error, match=name):
        training_cost(table(), **given)


def test_what_is_no_prediction() -> None:
    with pytest.raises(TypeError, match="takes what predict or sweep returned, got 'h100'"):
        training_cost(["h100"], tokens=1e12, price_per_gpu_hour=2.0)  # type: ignore[list-item]
    with torch.device("meta"):
        made = predict(nn.Linear(64, 64), torch.empty(4, 64), "h100", 8)
    with pytest.raises(ValueError, match="sample input has no tokens"):
        training_cost([made], tokens=1e12, price_per_gpu_hour=2.0)


def test_text_data_and_picture(tmp_path: Path) -> None:
    made = training_cost(table(), tokens=1.5e12, price_per_gpu_hour=2.0)
    text = str(made)
    lines = text.splitlines()
    assert lines[0] == "1.5T tokens"
    assert lines[1].split()[:5] == ["Hardware", "GPUs", "Batch", "Tokens/s", "of"]
    assert lines[2].split()[:3] == ["h100", "8", "32.8K"]
    assert f"Cheapest: 8 h100: {made.cheapest.days:,.1f} days, {made.cheapest.cost:,.0f}" in lines
    found = json.loads(json.dumps(made.to_dict()))
    assert [offer["cost"] for offer in found["offers"]] == [o.cost for o in made.offers]
    pytest.importorskip("matplotlib")
    made.picture(tmp_path / "cost.png")
    assert (tmp_path / "cost.png").stat().st_size > 10_000


# -- on the command line --------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    source = f"{__file__}:Model"
    common = ["--input", f"{__file__}:tokens", "--world-size", "8,64", "--quiet"]
    code = main(["cost", source, *common, "--param-dtype", "bf16", *args])
    out, err = capsys.readouterr()
    return code, out, err


def tokens() -> Tensor:
    return torch.empty(4, 1024, dtype=torch.long)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = ("--hardware", "h100,b200", "--tokens", "1T", "--price", "2,4")
    code, out, _ = run(capsys, *given, "--goodput", "0.9")
    assert code == 0
    assert out.startswith("1T tokens, 90% of the time in steps\n")
    assert [line.split()[:2] for line in out.splitlines()[2:6]] == [
        ["h100", "8"], ["h100", "64"], ["b200", "8"], ["b200", "64"],
    ]  # fmt: skip
    code, out, _ = run(capsys, *given, "--json", "--checkpointing", "none,full")
    offers = json.loads(out)["offers"]
    assert len(offers) == 8
    assert {offer["prediction"]["activation_checkpointing"] for offer in offers} == {"none", "full"}
    bf16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    with torch.device("meta"):
        table = sweep(Model(), tokens(), "b200", [8], **bf16)
    [expected] = training_cost(table, 1e12, 4.0).offers
    assert offers[4]["cost"] == expected.cost
    pytest.importorskip("matplotlib")
    code, out, _ = run(capsys, *given, "--picture", str(tmp_path / "cost.svg"))
    assert code == 0
    assert (tmp_path / "cost.svg").exists()
    code, out, err = run(capsys, *given, "--picture", str(tmp_path / "cost.abc"))
    assert code == 2
    assert "The table is whole, but its picture was not written" in err
    assert out.startswith("1T tokens")


def test_wrong_commands(capsys: pytest.CaptureFixture[str]) -> None:
    many = run(capsys, "--hardware", "h100", "--tokens", "1T", "--price", "2,4")
    assert many[0] == 2
    assert "--price has 2 prices for 1 kinds of GPUs" in many[2]
    twice = run(capsys, "--hardware", "h100,h100", "--tokens", "1T", "--price", "2")
    assert "--hardware has two of the same name: h100, h100" in twice[2]
    for name, value, told in (
        ("--tokens", "many", "'many' is not a number such as 300B, 15T or 1e12"),
        ("--tokens", "-1T", "'-1T' is not positive and finite"),
        ("--price", "0", "'0' is not positive and finite"),
    ):
        given = {"--hardware": "h100", "--tokens": "1T", "--price": "2", name: value}
        code, _, err = run(capsys, *(f"{k}={v}" for k, v in given.items()))
        assert code == 2
        assert told in err
