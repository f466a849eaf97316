"""What one unit adds to a step, in numbers that no other process disturbs.

    python -m benchmarks.calls                # a table
    python -m benchmarks.calls --functions    # and what is called, most often first
    python -m benchmarks.calls --instructions # and instructions, by callgrind, which takes minutes

Forward and backward of the stack of `benchmarks.hooks`, with matrices of 16 x 16, so that bytes do
not matter: Python functions and their bytecodes, C functions called from Python, operators,
allocations of tensors, instructions of the processor. Counted in a deep and in a less deep stack,
minus the plain model's. The difference per block is what a unit costs; what a root costs once drops
out. One process, as rank 0 of a `fake` group of two: its collectives are made of operators too, and
those are counted. Page faults are those of whole steps of the benchmark's own stack.

``tests/tools/test_calls.py`` holds the numbers of fsdp2 to limits.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields
from functools import cache, partial
from multiprocessing import get_context
from resource import RUSAGE_SELF, getrusage
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from . import machine
from .hooks import WARM_UP_STEPS, make_stack
from .models import StackConfig
from .ranks import progress
from .report import write_readme
from .structure import make_group
from .variants import BASELINE, OURS, Variant, build

PLAIN, FSDP1 = "plain", "FSDP1"
DEPTHS = 2, 6
BEGIN, END = "<!-- calls:begin -->", "<!-- calls:end -->"
OPERATORS = ("aten::", "c10d::", "fsdp::")


@dataclass
class Counts:
    """What one unit adds to forward and backward.

    Attributes:
        python: calls by name of the Python function.
        c: calls of C functions by Python code.
        operators: by name, those that operators call included.
        bytecodes: by name of the Python function.
        allocations: of tensors' memory, their number and bytes.
    """

    python: Counter[str]
    c: Counter[str]
    operators: Counter[str]
    bytecodes: Counter[str] = field(default_factory=Counter)
    allocations: Counter[str] = field(default_factory=Counter)

    def less(self, other: Counts) -> Counts:
        """These counts minus ``other``, which may leave negative ones."""
        return self._combine(other, lambda mine, theirs: mine - theirs)

    def over(self, units: int) -> Counts:
        """These counts per unit, rounded."""
        return self._combine(self, lambda mine, _: round(mine / units))

    def _combine(self, other: Counts, function: Callable[[int, int], int]) -> Counts:
        pairs = [(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)]
        combined = (
            Counter({name: function(a[name], b[name]) for name in {*a, *b}}) for a, b in pairs
        )
        return Counts(*combined)


def measure(name: str) -> Counts:
    """What each unit of the variant ``name`` adds to the plain model's forward and backward."""
    shallow, deep = (_count(name, depth).less(_count(PLAIN, depth)) for depth in DEPTHS)
    return deep.less(shallow).over(DEPTHS[1] - DEPTHS[0])


def measure_alone(names: list[str]) -> dict[str, Counts]:
    """Measure in a process that did nothing else; a default process group is made and left."""
    make_group()
    try:
        return {name: measure(name) for name in names}
    finally:
        dist.destroy_process_group()


def _count(name: str, num_blocks: int) -> Counts:
    variant, step = training(name, _small(num_blocks))
    _next_step(variant)
    python, c = called_by(step)
    _next_step(variant)
    bytecodes = bytecodes_of(step)
    _next_step(variant)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    operators = Counter(
        {
            event.key: event.count
            for event in recorded.key_averages()
            if event.key.startswith(OPERATORS)
        }
    )
    events: Any = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    taken = [size for size in sizes if size > 0]
    return Counts(python, c, operators, bytecodes, Counter(number=len(taken), bytes=sum(taken)))


def _small(num_blocks: int) -> StackConfig:
    return StackConfig(width=16, hidden=32, num_blocks=num_blocks)


def training(name: str, config: StackConfig) -> tuple[Variant, Callable[[], None]]:
    """A variant of the stack after some steps, and forward and backward of it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    variant = build(name, partial(make_stack, config), mesh, bf16=False)
    x = torch.randn(1, 4, config.width)

    def step() -> None:
        variant.model(x).sum().backward()

    for _ in range(WARM_UP_STEPS):
        _next_step(variant)
        step()
    return variant, step


def _next_step(variant: Variant) -> None:
    variant.model.zero_grad()


def called_by(function: Callable[[], None]) -> tuple[Counter[str], Counter[str]]:
    """The Python and the C functions that ``function`` calls in this thread."""
    python: Counter[str] = Counter()
    c: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            python[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            c[argument.__qualname__] += 1

    _call_under(function, note, sys.getprofile, sys.setprofile)
    return python, c


def _call_under(
    function: Callable[[], None],
    note: Callable[[FrameType, str, Any], Any],
    current: Callable[[], Any],
    put: Callable[[Any], None],
) -> None:
    before, collects = current(), gc.isenabled()
    gc.disable()  # a collection calls finalizers, and what other tests have put in `gc.callbacks`
    put(note)
    try:
        function()
    finally:
        put(before)
        if collects:
            gc.enable()


def bytecodes_of(function: Callable[[], None]) -> Counter[str]:
    """The bytecodes that ``function`` runs in this thread, by the Python function."""
    found: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            found[frame.f_code.co_qualname] += 1
        return trace

    _call_under(function, trace, sys.gettrace, sys.settrace)
    return found


def page_faults(name: str) -> float:
    """Of forward and backward of the stack of `benchmarks.hooks`, the median of some steps."""
    make_group()
    variant, step = training(name, StackConfig())
    faults = []
    for _ in range(15):
        _next_step(variant)
        before = getrusage(RUSAGE_SELF).ru_minflt
        step()
        faults.append(getrusage(RUSAGE_SELF).ru_minflt - before)
    return statistics.median(faults)


def instructions(name: str) -> int:
    """What each unit adds to the plain model's step, as callgrind counts them."""
    counted = [_instructions(each, depth) for each in (name, PLAIN) for depth in DEPTHS]
    deep, plain = counted[1] - counted[0], counted[3] - counted[2]
    return round((deep - plain) / (DEPTHS[1] - DEPTHS[0]))


@cache
def _instructions(name: str, depth: int) -> int:
    progress(f"callgrind: {name}, {depth} blocks")
    program = [sys.executable, "-m", "benchmarks.calls", "--one-step", name, str(depth)]
    with tempfile.TemporaryDirectory() as folder:
        tool = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
        tool.append(f"--callgrind-out-file={folder}/out")
        done = subprocess.run([*tool, *program], capture_output=True, text=True, check=True)
    return int(re.findall(r"Collected : (\d+)", done.stderr)[-1])


def one_step(name: str, depth: int) -> None:
    """A step in a process of its own, of which only the step is counted."""
    make_group()
    variant, step = training(name, _small(depth))
    _next_step(variant)
    gc.collect()
    for change, function in (("on", step), ("off", lambda: None)):
        subprocess.run(["callgrind_control", "-i", change, str(os.getpid())], check=True)
        function()


def rows(measured: dict[str, Counts], *, with_instructions: bool) -> dict[str, dict[str, str]]:
    """What a unit adds, by variant and measure."""
    found = {}
    for name, counts in measured.items():
        taken = counts.allocations
        found[name] = {
            "Python calls": f"{counts.python.total():,}",
            "bytecodes": f"{counts.bytecodes.total():,}",
            "C calls": f"{counts.c.total():,}",
            "operators": f"{counts.operators.total():,}",
            "allocations": f"{taken['number']:,} ({taken['bytes']:,} B)",
            "page faults, 64 x 64": f"{_alone(page_faults, name) / StackConfig().num_blocks:.1f}",
        }
        if with_instructions:
            found[name]["instructions"] = f"{instructions(name):,}"
    return found


def _alone(function: Callable[[str], Any], name: str) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, name).result()


def main() -> None:
    parser = argparse.ArgumentParser(description="what a unit adds to a step, counted")
    parser.add_argument("--functions", action="store_true", help="list what fsdp2 calls")
    parser.add_argument("--instructions", action="store_true", help="count them with callgrind")
    parser.add_argument(
        "--write-docs", action="store_true", help="table in docs/developers/measurements.md"
    )
    parser.add_argument("--one-step", nargs=2, metavar=("NAME", "DEPTH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one_step:
        one_step(options.one_step[0], int(options.one_step[1]))
        return
    measured = measure_alone([BASELINE, FSDP1, OURS])
    table = rows(measured, with_instructions=options.instructions)
    measures = list(table[OURS])
    lines = [f"| a unit adds | {' | '.join(measures)} |", "| --- |" + " ---: |" * len(measures)]
    for name, cells in table.items():
        lines.append(f"| {name} | {' | '.join(cells[each] for each in measures)} |")
    about = machine.describe()
    what = f"{about['machine']['cpu']}; torch {about['versions']['torch']}; {about['date'][:10]}"
    text = "\n".join([f"{what}.", "", *lines])
    print(text)
    if options.write_docs:
        write_readme(
            machine.REPOSITORY / "docs" / "developers" / "measurements.md", text, BEGIN, END
        )
    if options.functions:
        ours = measured[OURS]
        kinds = {"Python": ours.python, "bytecodes": ours.bytecodes, "C": ours.c}
        for kind, names in {**kinds, "operators": ours.operators}.items():
            print(f"\n{kind}:")
            for called, count in names.most_common():
                if count:
                    print(f"{count:5} {called}")


if __name__ == "__main__":
    main()
