"""`Hardware.step_factors`: what whole steps take beyond their measured parts."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not plan", allow_module_level=True)

from by_keywords import make_setup, predict, trace_step
from fsdp2.planning import PRESETS, Hardware, Simulator, find_hardware, write_hardware
from fsdp2.planning.hardware.hardware import STEP_PARTS
from fsdp2.planning.hardware.reference_models import QUICK
from fsdp2.planning.hardware.reference_steps import (
    ReferencePredictor,
    ReferenceStep,
    fitted,
    step_factors,
)
from fsdp2.planning.replay.device import Collective
from fsdp2.planning.simulation.costs import operation_s, transfer_cost
from fsdp2.planning.trace.events import Operation
from fsdp2.transports.host.topology import Topology
from fsdp2.wrap import units_of

f32 = torch.float32
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def measured(**more: Any) -> Hardware:
    options: dict[str, Any] = {
        "operator_s": {"aten::add float32": ((1e2, 2e-6), (1e6, 2e-3))},
        "operator_flops": {"aten::mm float32": ((1.0, 1e8), (10.0, 1e9))},
        "collective_s": {f"{kind} 2": ((1e3, 1e-4), (1e6, 1e-2)) for kind in KINDS},
        "host_ordered": True,
        "launch_s": 1e-5,
        "kernel_s": 1e-6,
    }
    return replace(PRESETS["cpu"], **options | more)


def test_factors_with_which_steps_were_made_are_found() -> None:
    collectives = {f"{kind} 2": ((1e3, 1e-3), (1e6, 1e-1)) for kind in KINDS}
    hardware = measured(collective_s=collectives)
    made = {"multiply": 1.3, "move": 1.5, "gather": 2.0, "reduce": 0.7, "optimizer": 1.2}
    real = replace(hardware, step_factors=made)
    steps = []
    predictor = ReferencePredictor(QUICK["many"], 2, torch.device("cpu"))
    for strategy, samples in product(("unsharded", "full", "grad", "none"), (2, 64)):
        predicted = predictor.of(strategy, samples)
        steps.append(ReferenceStep(strategy, predicted(real), predicted))
    found = step_factors(steps, hardware)
    assert found.keys() == set(STEP_PARTS)
    assert found["convolve"] == found["attend"] == 1  # the steps say nothing of them
    assert found["gather"] > 1.5 > 1 > found["reduce"]
    for step in steps:
        before, after = (
            sum(step.predict(each)) / sum(step.seconds)
            for each in (hardware, replace(hardware, step_factors=found))
        )
        assert abs(after - 1) < 0.05 < abs(before - 1)


def test_what_steps_hardly_depend_on_keeps_its_time() -> None:
    def seconds(factors: Any) -> list[float]:
        return [factors["a"] + 1e-3 * factors["b"]]

    found = fitted(seconds, [1.5], ("a", "b"))
    stiffness = 0.1  # relative to one step
    assert found["a"] == pytest.approx(1.5 ** (1 / (1 + stiffness)), abs=0.01)
    assert found["b"] == pytest.approx(1, abs=0.01)
    # A measurement that went wrong does not make a part take no time, or all of it.
    assert fitted(seconds, [1e6], ("a", "b"))["a"] == pytest.approx(3)


def test_operators_and_collectives_take_their_factor() -> None:
    factors = {part: 2.0 + i for i, part in enumerate(STEP_PARTS)}
    hardware, plain = measured(step_factors=factors), measured()
    flops, start_s = 10**6, plain.kernel_s

    def in_step(part: str, measured_s: float) -> Any:
        """What every operator takes is the host's."""
        longer_s = factors[part] * (measured_s - start_s) + factors["host"] * start_s
        return pytest.approx(longer_s)

    for part, operation in {
        "convolve": Operation(flops, 10**5, f32, operator="aten::convolution_backward"),
        "attend": Operation(flops, 10**5, f32, attention=True, operator="aten::flash"),
        "move": Operation(0, 10**5, f32, operator="aten::native_layer_norm"),
    }.items():
        assert operation_s(operation, hardware) == in_step(part, operation_s(operation, plain))
    ring = Topology(2, 1, 2, 1).ring("shard", 2)
    for kind in KINDS:
        transfer = Collective(kind, "shard", 10**5, 10**5, 3, "")
        before, after = (transfer_cost(transfer, ring, each) for each in (plain, hardware))
        assert after.fixed_s == pytest.approx(factors["call"] * before.fixed_s)
        of_bytes = factors["gather" if kind == "all_gather" else "reduce"]
        assert after.shared_s == pytest.approx(of_bytes * before.shared_s)
    # At a tenth of the highest rate, nine tenths of the time are for the operands.
    slow, fast = (Operation(flops, n, f32, operator="aten::addmm") for n in (10**6, 10**5))
    least_s, rest_s = 1e-3, 9e-3 + start_s
    assert operation_s(slow, plain) == pytest.approx(least_s + rest_s)
    for operation, beyond_s in ((slow, rest_s), (fast, start_s)):
        in_step_s = operation_s(operation, hardware) - factors["multiply"] * least_s
        assert in_step_s == in_step("operands", beyond_s)
    # What was not measured is by the data sheet.
    assert operation_s(Operation(flops, 1, torch.bfloat16), hardware) == operation_s(
        Operation(flops, 1, torch.bfloat16), plain
    )


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))


def test_the_host_and_the_optimizer_take_their_factor() -> None:
    made = model()
    trace = trace_step(made, torch.randn(8, 16), ["0", "1", "2"], device_type="cpu")
    setup = make_setup(units_of(made, "auto"), 2)

    def step(**factors: float) -> Any:
        return Simulator(measured(step_factors=factors, optimizer_launch_s=1e-4)).run(trace, setup)

    plain, host, optimizer = step(), step(host=3.0), step(optimizer=3.0)
    number = sum(len(getattr(each.work, "operations", ())) for each in plain.launches)
    of_each_s = 1e-5 + 1e-6  # launch_s and kernel_s
    assert host.compute_s - plain.compute_s == pytest.approx(2 * of_each_s * number)
    assert optimizer.compute_s == plain.compute_s
    assert host.optimizer_s + optimizer.optimizer_s == pytest.approx(4 * plain.optimizer_s)


def test_a_prediction_says_that_it_has_factors() -> None:
    x = torch.randn(8, 16)
    hardware = measured(step_factors={"multiply": 1.25, "move": 1.5})
    [note] = predict(model(), x, hardware, 2).notes
    assert "multiply 1.25, move 1.50" in note
    assert note in str(predict(model(), x, hardware, 2))
    assert predict(model(), x, measured(), 2).notes == []


def test_presets_have_no_factors() -> None:
    for hardware in PRESETS.values():
        assert not hardware.step_factors


def test_files_that_were_measured_before_say_what_they_said(tmp_path: Path) -> None:
    path = tmp_path / "ours.json"
    write_hardware(measured(step_factors={"move": 2.0}), path)
    told = json.loads(path.read_text())
    assert find_hardware(str(path)).step_factors == {"move": 2.0}
    del told["step_factors"]
    path.write_text(json.dumps(told))
    assert find_hardware(str(path)) == replace(measured(), step_factors={})


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"step_factors": {"multply": 1}}, "there is no part 'multply'.*multiply"),
        ({"step_factors": {"move": 0}}, r"step_factors\['move'\] must be positive"),
        ({"step_factors": [1]}, "step_factors has to be an object with a number for each part"),
        ({"step_factors": {"move": "2"}}, "step_factors has to be an object with a number"),
    ],
)
def test_a_factor_that_is_none_is_named(tmp_path: Path, told: Any, message: str) -> None:
    path = tmp_path / "ours.json"
    path.write_text(json.dumps({"base": "cpu", **told}))
    with pytest.raises(ValueError, match=f"ours.json: .*{message}"):
        find_hardware(str(path))
