"""`measure`: tables of hardware, the file that holds them, and steps that are simulated by them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import harness
from harness import run_on

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not plan", allow_module_level=True)

from by_keywords import make_setup, plan, trace_step
from example_runs import environment, free_port
from fsdp2.cli.main import main
from fsdp2.planning import PRESETS, Hardware, Simulator, find_hardware, measure, write_hardware
from fsdp2.planning.hardware.curves import curve, rate_at, rising, seconds_at
from fsdp2.planning.hardware.hardware import STEP_PARTS
from fsdp2.planning.hardware.measure import medians, to_dict
from fsdp2.planning.hardware.timed import OperatorTimes, Timed, tables, two_constants
from fsdp2.planning.hardware.workloads import _training
from fsdp2.planning.outcomes import bound_sentence
from fsdp2.planning.replay.device import Collective
from fsdp2.planning.simulation.costs import operation_s, transfer_cost
from fsdp2.planning.trace.events import Operation
from fsdp2.transports.host.topology import Topology
from fsdp2.wrap import units_of

f32, bf16 = torch.float32, torch.bfloat16


def model() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(3)]
    return nn.Sequential(*blocks)


def tabled(**more: Any) -> Hardware:
    return replace(
        PRESETS["cpu"],
        kernel_s=1e-6,
        operator_s={"aten::add float32": ((1e3, 2e-6), (1e6, 2e-3))},
        operator_flops={"aten::mm float32": ((1.0, 1e9), (10.0, 1e10))},
        collective_s={"all_gather 2": ((1e3, 1e-4), (1e6, 1e-3))},
        **more,
    )


def test_ranks_that_chose_other_kernels() -> None:
    """By position, the times of different operations would become one."""
    one, two, three = (Operation(0, nbytes, f32) for nbytes in (100, 200, 300))
    every = [
        [Timed(one, 1.0), Timed(two, 5.0)],
        [Timed(two, 7.0), Timed(one, 3.0)],
        [Timed(one, 2.0), Timed(three, 9.0)],
    ]
    assert {each.operation: each.seconds for each in medians(every)} == {
        one: 2.0,
        two: 6.0,
        three: 9.0,
    }


def test_points_are_interpolated_in_logarithms() -> None:
    points = ((1e2, 1e-6), (1e4, 1e-4))
    assert seconds_at(points, 1) == seconds_at(points, 100) == 1e-6
    assert seconds_at(points, 1e3) == pytest.approx(1e-5)
    assert seconds_at(points, 1e4) == 1e-4
    assert seconds_at(points, 3e4) == pytest.approx(3e-4)
    rates = ((2.0, 1e9), (8.0, 4e9))
    assert rate_at(rates, 1.0) == 5e8  # memory
    assert rate_at(rates, 4.0) == pytest.approx(2e9)
    assert rate_at(rates, 100.0) == 4e9


def test_samples_close_together_are_one_point_and_times_never_fall() -> None:
    assert curve([(100, 3.0), (101, 1.0), (102, 2.0), (1000, 5.0)]) == ((101, 2.0), (1000, 5.0))
    assert rising(((1, 1.0), (2, 9.0), (3, 4.0), (4, 6.0), (5, 7.0))) == (
        (1, 1.0), (2, 6.0), (3, 6.0), (4, 6.0), (5, 7.0),
    )  # fmt: skip


def test_two_constants_are_found_in_points_that_follow_them() -> None:
    points = tuple((ai, 1e12 * ai / (ai + 50)) for ai in (1.0, 10.0, 100.0, 1e9))
    most, half = two_constants(points)
    assert (most, half) == (pytest.approx(1e12), pytest.approx(50))
    hardware = replace(
        PRESETS["h100"], matmul_flops={bf16: most}, matmul_efficiency=1.0, half_intensity=half
    )
    got = operation_s(Operation(10**12, 10**10, bf16), hardware)  # 100 FLOP per byte
    assert got == pytest.approx(1.5)


def test_operators_take_what_was_measured() -> None:
    hardware = tabled()
    add = Operation(0, 10**6, f32, operator="aten::add")
    assert operation_s(add, hardware) == pytest.approx(2e-3)
    # Not measured: like the nearest that is.
    assert operation_s(replace(add, operator="aten::erf"), hardware) == pytest.approx(2e-3)
    assert operation_s(replace(add, dtype=bf16), hardware) == pytest.approx(2e-3)
    mm = Operation(10**9, 10**8, f32, operator="aten::addmm")
    assert operation_s(mm, hardware) == pytest.approx(1e-6 + 0.1)
    # A dtype that was not measured: by the data sheet.
    assert operation_s(replace(mm, dtype=bf16), hardware) == pytest.approx(1e9 / (60e9 * 0.8))


def test_attention_that_was_not_measured_is_like_attention() -> None:
    flex = Operation(10**9, 10**7, f32, attention=True, operator="higher_order::flex_attention")
    assert operation_s(flex, tabled()) == pytest.approx(1e-6 + 0.1)  # only mm is known
    rates = {"aten::mm float32": ((1.0, 1e10),), "attention float32": ((1.0, 5e9),)}
    assert operation_s(flex, replace(tabled(), operator_flops=rates)) == pytest.approx(1e-6 + 0.2)


def test_presets_do_not_know_names_of_operators() -> None:
    for hardware in PRESETS.values():
        assert not (hardware.operator_s)
        assert not (hardware.operator_flops)
        assert not (hardware.collective_s)
        named = Operation(10**9, 10**6, f32, operator="aten::mm")
        assert operation_s(named, hardware) == operation_s(replace(named, operator=""), hardware)


def test_collectives_take_what_was_measured_of_groups_of_their_size() -> None:
    hardware = tabled(message_s=1e-5)
    transfer = Collective("all_gather", "shard", 10**6, 5 * 10**5, 3, "")
    cost = transfer_cost(transfer, Topology(2, 1, 2, 1).ring("shard", 2), hardware)
    assert cost.total_s == pytest.approx(1e-3 + 2 * 1e-5)
    assert cost.shared_s == pytest.approx(1e-3 - 1e-4)  # beyond what the smallest take
    four = Topology(4, 1, 4, 1).ring("shard", 4)
    plain = replace(hardware, collective_s={})
    assert transfer_cost(transfer, four, hardware) == transfer_cost(transfer, four, plain)


def test_a_host_that_orders_everything_hides_nothing() -> None:
    made = model()
    trace = trace_step(made, torch.randn(8, 64), ["0", "1", "2"], device_type="cpu")
    setup = make_setup(units_of(made, "auto"), 2)
    slow = Simulator(tabled(host_ordered=True), None).run(trace, setup)
    assert {each.stream for each in slow.launches} == {"compute"}
    assert slow.stream_s.keys() == {"compute", "all-gather", "reduce-scatter"}
    assert slow.exposed_s == pytest.approx(sum(slow.stream_s.values()) - slow.compute_s)
    assert "Nothing is communicated" not in bound_sentence(slow)
    assert [s.begin for s in slow.spans[1:]] == pytest.approx([s.end for s in slow.spans[:-1]])
    assert {type(each.work).__name__ for each in slow.launches} == {"Compute", "Collective"}
    # What goes on meanwhile takes no time, but a call does.
    half = Simulator(tabled(host_ordered=True, overlap=1.0), None).run(trace, setup)
    assert 0 < half.seconds < slow.seconds
    # The host's time for each operator adds to it.
    busy = Simulator(tabled(host_ordered=True, launch_s=1e-3), None).run(trace, setup)
    number = sum(len(getattr(each.work, "operations", ())) for each in slow.launches)
    assert busy.seconds - slow.seconds == pytest.approx(number * 1e-3)


def test_each_further_parameter_of_a_unit_takes_its_time() -> None:
    made = model()
    trace = trace_step(made, torch.randn(8, 64), ["0", "1", "2"], device_type="cpu")
    setup = make_setup(units_of(made, "auto"), 2)
    plain = tabled(host_ordered=True)
    plain = replace(plain, collective_s={f"{k} 2": ((1e3, 1e-4),) for k in (
        "all_gather", "reduce_scatter", "all_reduce")})  # fmt: skip
    step = Simulator(plain, None).run(trace, setup)
    # Each unit has four parameters: three more in each gather and in each reduction.
    transfers = [each.work for each in step.launches if isinstance(each.work, Collective)]
    assert {each.params for each in transfers} == {4}
    longer = Simulator(replace(plain, param_s=1e-3), None).run(trace, setup)
    assert longer.seconds - step.seconds == pytest.approx(len(transfers) * 3e-3)
    replicated = make_setup(units_of(made, "auto"), 2, strategy="none")
    summed = Simulator(plain, None).run(trace, replicated)
    sums = [each.work for each in summed.launches if isinstance(each.work, Collective)]
    assert {each.kind for each in sums} == {"all_reduce"}
    assert sum(each.params for each in sums) == len(list(made.parameters()))


def test_optimizers_of_sharded_parameters_take_time_of_the_host() -> None:
    made = model()
    trace = trace_step(made, torch.randn(8, 64), ["0", "1", "2"], device_type="cpu")
    setup = make_setup(units_of(made, "auto"), 2)
    by_hand = tabled(host_ordered=True, launch_s=1e-5)
    one = Simulator(by_hand, "sgd").run(trace, setup)
    two = Simulator(replace(by_hand, optimizer_launch_s=2e-5), "sgd").run(trace, setup)
    number = len(list(made.parameters()))  # of operators, too
    assert two.optimizer_s - one.optimizer_s == pytest.approx(number * 1e-5)
    assert two.seconds - one.seconds == pytest.approx(number * 1e-5)


def test_operators_that_checkpointing_repeats_take_time_of_the_host() -> None:
    made = model()
    names = ["0", "1", "2"]
    x = torch.randn(8, 64)
    again = trace_step(
        made, x, names, device_type="cpu", activation_checkpointing="full", checkpoint_modules=names
    )
    once = trace_step(made, x, names, device_type="cpu")
    assert not any(getattr(event, "num_recomputed", 0) for event in once.events)
    number = sum(getattr(event, "num_recomputed", 0) for event in again.events)
    every, first = (
        sum(len(getattr(event, "operations", ())) for event in each.events)
        for each in (again, once)
    )
    assert number == every - first
    assert 3 * 2 <= number <= 3 * 3  # the norm need not be repeated
    setup = make_setup(units_of(made, "auto"), 2)
    plain = Simulator(tabled(host_ordered=True), None).run(again, setup)
    longer = Simulator(tabled(host_ordered=True, recompute_s=1e-3), None).run(again, setup)
    assert longer.seconds - plain.seconds == pytest.approx(number * 1e-3)


def test_causal_attention_has_speeds_of_its_own() -> None:
    """Kernels do not skip all that counts as nothing: by other speeds it would be too short."""
    times = OperatorTimes(torch.device("cpu"))
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    with times:
        for causal in (True, False):
            nn.functional.scaled_dot_product_attention(q, q, q, is_causal=causal).sum().backward()
    found = {each.operation.operator for each in times.found() if each.operation.attention}
    assert len(found) == 4
    assert sum(name.endswith("_causal") for name in found) == 2
    assert {f"{name} float32" for name in found} < tables(times.found(), 0.0)[1].keys()


def test_copies_of_a_workload_are_run_forward_before_any_backward() -> None:
    order: list[str] = []

    class Noted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order.append("forward")
            made = super().forward(x)
            made.register_hook(lambda grad: order.append("backward"))
            return made

    x = torch.randn(4, 8)
    nbytes = 4 * (x.nbytes + 4 * 8 * 8)  # with results and gradients
    _training(lambda: (Noted(8, 8, bias=False), (x.clone(),)), 3 * nbytes)()
    assert order == ["forward"] * 3 + ["backward"] * 3


@pytest.mark.long
def test_ranks_that_measure_from_python_do_not_wait_for_one_that_failed(tmp_path: Path) -> None:
    script = """
if rank == 1:
    def fails(*args):
        raise RuntimeError("no more kernels")
    module._run = fails
def main(options):
    dist.init_process_group("gloo")
    try:
        fsdp2.planning.hardware.measure(quick=True)
    except RuntimeError as error:
        print(f"rank {rank} got: {error}", file=sys.stderr, flush=True)
        time.sleep(4)  # as where an error is caught: connections and the store stay there
    os._exit(7)
"""
    ended = measure_on(3, tmp_path / "ours.json", script, tmp_path)
    for rank, (code, err, seconds) in enumerate(ended):
        assert code == 7
        by = "" if rank == 1 else "measure: rank 1: RuntimeError: "
        assert f"rank {rank} got: {by}no more kernels" in err
        assert seconds < 90  # others would wait for the timeout of the group


def test_operators_are_timed_as_a_trace_counts_them() -> None:
    times = OperatorTimes(torch.device("cpu"))
    made, x = model(), torch.randn(8, 64)
    trace = trace_step(made, x, [""], device_type="cpu")
    with times:
        made(x).sum().backward()
    traced = {o for event in trace.events for o in getattr(event, "operations", ())}
    assert traced <= {each.operation for each in times.found()}
    assert {o.operator for o in traced} >= {"aten::addmm", "aten::gelu", "aten::native_layer_norm"}
    seconds, flops = tables(times.found(), 0.0)
    assert flops.keys() == {"aten::addmm float32", "aten::mm float32"}
    assert "aten::gelu_backward float32" in seconds
    attention = Operation(100, 10, f32, attention=True, operator="aten::fused")
    assert tables([Timed(attention, 1.0)], 0.0)[1].keys() == {
        "aten::fused float32", "attention float32",
    }  # fmt: skip


def _quick(path: str) -> None:
    made = measure(quick=True, folder=str(Path(path).parent))
    every: list[Any] = [None, None]
    dist.all_gather_object(every, to_dict(made) | {"measured": 0})
    assert every[0] == every[1]
    if dist.get_rank() == 0:
        write_hardware(made, path)


def test_a_measured_file_is_hardware_for_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "ours.json"
    run_on(2, _quick, str(path))
    assert [each.name for each in tmp_path.iterdir()] == ["ours.json"]
    about = json.loads(path.read_text())["measured"]
    assert about["torch"] == torch.__version__
    assert about["ranks"] == 2
    assert about["device"]
    hardware = find_hardware(str(path))
    assert hardware.collective_s.keys() == {
        f"{kind} 2" for kind in ("all_gather", "reduce_scatter", "all_reduce")
    }
    assert hardware.host_ordered
    assert 0 <= hardware.overlap <= 1
    assert hardware.disk_write_bandwidth > 0
    assert hardware.disk_read_bandwidth > 0
    assert {f32, bf16} == hardware.matmul_flops.keys()
    assert hardware.step_factors.keys() == set(STEP_PARTS)
    assert "4 steps of models: median error" in hardware.source
    made = plan(model(), torch.randn(8, 64), str(path), 2, activation_checkpointing=("none",))
    assert made.chosen.seconds > 0
    assert made.step.stream_s.keys() > {"compute"}
    # What is written is what is read.
    again = tmp_path / "again.json"
    write_hardware(hardware, again)
    assert find_hardware(str(again)) == hardware


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ours.json"
    write_hardware(tabled(), path)
    before = path.read_text()

    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(json, "dump", fails)
    with pytest.raises(OSError, match="disk full"):
        write_hardware(tabled(name="other"), path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match=r"ends in \.json"):
        write_hardware(tabled(), tmp_path / "ours.txt")


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"operator_s": [1]}, "operator_s has to be an object of lists of pairs of numbers"),
        ({"operator_s": {"aten::add float32": [[1, 2, 3]]}}, "operator_s has to be an object"),
        ({"collective_s": {"all_gather 2": []}}, r"collective_s\['all_gather 2'\] must be pairs"),
        ({"operator_flops": {"mm": [[1, -1]]}}, r"operator_flops\['mm'\] must be pairs of positiv"),
        ({"operator_flops": {"mm": [[2, 1], [1, 1]]}}, r"\['mm'\] must be in the order"),
        ({"operator_s": {"aten::add": [[1, 1]]}}, "operator_s: 'aten::add' has to be like 'aten"),
        ({"operator_flops": {"aten::mm f32": [[1, 1]]}}, "'aten::mm f32' has to be like"),
        ({"collective_s": {"all_gathr 2": [[1, 1]]}}, "'all_gathr 2' has to be like 'all_gather"),
        ({"collective_s": {"all_gather 2 on": [[1, 1]]}}, "'all_gather 2 on' has to be like"),
        ({"base": "cup"}, "base: there is no preset 'cup'.*cpu"),
        ({"host_ordered": 1}, "host_ordered has to be true or false"),
        ({"overlap": 2}, "overlap is a part, got 2"),
        ({"message_s": -1}, "message_s must not be negative"),
        ({"operators_s": {}}, "there is no field 'operators_s'.*operator_s"),
    ],
)
def test_a_file_with_a_mistake_is_named_with_its_key(
    tmp_path: Path, told: dict[str, Any], message: str
) -> None:
    path = tmp_path / "ours.json"
    path.write_text(json.dumps({"base": "cpu", **told}))
    with pytest.raises(ValueError, match=f"ours.json: .*{message}"):
        find_hardware(str(path))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"base": "cpu", "overlap": 0.1, "overlap": 0.9}', "overlap"),
        ('{"base": "cpu", "base": "h100"}', "base"),
        ('{"base": "cpu", "operator_s": {"aten::add float32": [[1, 1]], '
         '"aten::add float32": [[1, 2]]}}', "aten::add float32"),
    ],
)  # fmt: skip
def test_a_key_that_a_file_has_twice_is_named(tmp_path: Path, text: str, key: str) -> None:
    path = tmp_path / "ours.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"ours.json has '{key}' twice"):
        find_hardware(str(path))


def measure_on(
    num_ranks: int, printed: Path, script: str, tmp_path: Path
) -> list[tuple[int, str, float]]:
    """Run a script on ranks that no launcher ends: exit code, stderr and seconds of each.

    Args:
        script: Python that runs on each rank before ``main``; it may change ``options`` by rank.
    """
    file = tmp_path / "rank.py"
    file.write_text(MEASURE.format(script=script))
    job = environment(
        WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()),
        LOCAL_WORLD_SIZE=str(num_ranks), TORCHELASTIC_USE_AGENT_STORE="False",
    )  # fmt: skip
    begin = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(file), "measure", "--quick", "--quiet", "--out", str(printed)],
            env=job | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    found = []
    try:
        for rank in ranks:
            _, err = rank.communicate(timeout=100)
            found.append((rank.returncode, err, time.monotonic() - begin))
    finally:
        for rank in ranks:
            rank.kill()
    return found


MEASURE = """
import os, sys, time
import torch.distributed as dist
from fsdp2.cli.main import main
import fsdp2.planning
rank, options = int(os.environ["RANK"]), sys.argv[1:]
module = sys.modules["fsdp2.planning.hardware.measure"]
module.measured_steps = lambda *args: []
{script}
sys.exit(main(options))
"""


@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.long)])
def test_ranks_end_with_the_cause_if_one_fails(failing: int, tmp_path: Path) -> None:
    """In the middle, while the others wait in a collective that nobody interrupts."""
    script = f"""
def fails(*args):
    time.sleep(1)
    raise RuntimeError("no more kernels")
if rank == {failing}:
    module._kernel_s = fails
else:
    # As with NCCL, where nobody sees that a connection was closed.
    module._kernel_s = lambda device: time.sleep(90)
"""
    ended = measure_on(3, tmp_path / "ours.json", script, tmp_path)
    for rank, (code, err, seconds) in enumerate(ended):
        assert code == 2, (rank, err)
        assert f"fsdp2: error: rank {failing} on " in err
        assert "no more kernels" in err
        assert ("Traceback" in err) == (rank == failing)
        assert seconds < 60
    assert not (tmp_path / "ours.json").exists()


@pytest.mark.long
def test_a_file_that_cannot_be_written_is_noticed_before_measuring(tmp_path: Path) -> None:
    script = """
def measured(device, quick):
    print("it measured", file=sys.stderr)
    return []
module._operators = measured
"""
    ended = measure_on(2, Path("/proc/ours.json"), script, tmp_path)
    for code, err, _ in ended:
        assert code == 2
        assert "rank 0 on " in err
        assert "--out: /proc/ours.json cannot be written" in err
    assert "it measured" not in ended[0][1]


def test_a_folder_that_one_rank_lacks_ends_all(tmp_path: Path) -> None:
    script = f"""
options += ["--folder", {str(tmp_path)!r} + "/no" * (rank == 1)]
"""
    for code, err, _ in measure_on(2, tmp_path / "ours.json", script, tmp_path):
        assert code == 2
        assert "rank 1 on " in err
        assert "--folder: there is no folder" in err


def test_the_command_refuses_what_it_could_not_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["measure", "--out", str(tmp_path / "ours.txt")]) == 2
    assert main(["measure", "--out", str(tmp_path / "no" / "ours.json")]) == 2
    assert main(["calibrate", "--out", "x.json", "--folder", str(tmp_path / "no")]) == 2
    (tmp_path / "folder.json").mkdir()
    assert main(["measure", "--out", str(tmp_path / "folder.json")]) == 2
    assert main(["measure", "--out", "/proc/ours.json"]) == 2
    told = capsys.readouterr().err
    assert "has to end in .json" in told
    assert "folder.json is a folder" in told
    assert "/proc/ours.json cannot be written" in told
    assert told.count("there is no folder") == 2
