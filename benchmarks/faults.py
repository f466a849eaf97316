"""Elastic training under faults: how many runs need a person, how many end with wrong numbers.

Two hosts (network namespaces) with two ranks each train `examples/train_lm.py --elastic` by
`examples/clusters/elastic.sh`; a third has the store of the rendezvous. At random moments, also
while an earlier fault is being mended, something breaks. A run needs a person if it does not train
on all four ranks again within two minutes. When its faults are through, the run is asked to
stop, and an undisturbed run is made there with the same numbers of ranks, step for step: its
losses, norms, weights and optimizer's state must be the same bit for bit. Needs root.

    python -m benchmarks.faults [--count 200] [--seed 0] [--kinds "host dies" "link cut"]
    python -m benchmarks.faults --only-table --write
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from . import machine
from .fault_cluster import (
    DISK_MB,
    FAULTS,
    HANG_AFTER_S,
    MEMORY_MB,
    OPTIONS,
    Cluster,
    Heal,
    until,
)
from .fault_reference import differences, segments, train
from .hosts import hosts, why_not
from .report import row, write_readme, write_record

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "faults.md"
PERSON_S = 120.0  # after which a run is said to need one
FAULTS_PER_RUN = 10
MANY_STEPS = "1000000"


def main(arguments: list[str] | None = None) -> int:
    """Injects faults and records them; 1 if a run needed a person or was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="faults (default 200)")
    parser.add_argument("--minutes", type=float, help="start no new run after these")
    parser.add_argument("--seed", type=int, default=0, help="of kinds and moments")
    parser.add_argument("--kinds", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--keep", help="a folder for the logs of runs that failed")
    parser.add_argument(
        "--write", action="store_true", help="write results/faults.json and docs/faults.md"
    )
    parser.add_argument("--only-table", action="store_true", help="of the runs that are recorded")
    options = parser.parse_args(arguments)
    if options.only_table:
        record = json.loads((RESULTS / "faults.json").read_text())
        show(record)
        if options.write:
            write_page(record)
        return 0
    if why_not():
        print(why_not(), file=sys.stderr)
        return 1
    # So that hosts and their processes end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    end = time.monotonic() + 60 * (options.minutes or 1e9)
    about = {**machine.describe(), "options": [*OPTIONS, "--hang-after", str(HANG_AFTER_S)]}
    runs: list[dict[str, Any]] = []
    record: dict[str, Any] = {"name": "faults", **about, "runs": runs}
    while sum(len(r["faults"]) for r in runs) < options.count and time.monotonic() < end:
        left = options.count - sum(len(r["faults"]) for r in runs)
        seed = options.seed + len(runs)
        done = run(seed, min(left, FAULTS_PER_RUN), options.kinds, options.keep)
        runs.append({**done, "commit": about["commit"]})
        if options.write:  # after each, so that what is found is kept if this is ended
            record = {"name": "faults", **about, "runs": together(earlier(record), runs)}
            write_record(record, RESULTS)
            write_page(record)
    show(record)
    return int(any(each["person"] or each["wrong"] for each in runs))


def show(record: dict[str, Any]) -> None:
    print(summary(record), *table(record), sep="\n")


def write_page(record: dict[str, Any]) -> None:
    """Puts the shorter table into the page."""
    text = "\n".join([f"{summary(record)}.", "", *page_table(record)])
    write_readme(PAGE, text, "<!-- faults:begin -->", "<!-- faults:end -->")


def earlier(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs that are recorded, if they were made with the same options."""
    path = RESULTS / "faults.json"
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    return found["runs"] if found.get("options") == record["options"] else []


def together(
    before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Runs of several commands; one of the same seed takes the place of the earlier one.

    Example:
        >>> together([{"seed": 1}, {"seed": 2, "wrong": ["x"]}], [{"seed": 2, "wrong": []}])
        [{'seed': 1}, {'seed': 2, 'wrong': []}]
    """
    return sorted(
        {each["seed"]: each for each in (*before, *now)}.values(), key=lambda each: each["seed"]
    )


def cluster_of(stack: ExitStack, num_training: int, seed: int, *watching: str) -> Cluster:
    """Hosts, not started, with their folders; they end with ``stack``."""
    found = stack.enter_context(hosts(num_training + 1))
    folder = stack.enter_context(file_system(DISK_MB))
    memory = {h.name: stack.enter_context(file_system(MEMORY_MB)) for h in found[:-1]}
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-logs-")))
    out = folder / "run"
    out.mkdir()
    text = folder / "text.py"
    shutil.copy(argparse.__file__, text)
    shared = (*OPTIONS, "--data", str(text), "--steps", MANY_STEPS, "--seed", str(seed))
    cluster = Cluster(found, out, logs, shared, memory, watching)
    stack.callback(cluster.end)
    return cluster


def run(seed: int, count: int, kinds: Sequence[str], keep: str | None = None) -> dict[str, Any]:
    """One run with ``count`` faults; its record."""
    chance = random.Random(seed)
    with ExitStack() as stack:
        cluster = cluster_of(stack, 2, seed, "--hang-after", str(HANG_AFTER_S))
        out, logs = cluster.out, cluster.logs
        deck = Deck(kinds, chance)
        record: dict[str, Any] = {"seed": seed, "faults": [], "person": "", "wrong": []}
        try:
            cluster.start_store()
            for host in cluster.training:
                cluster.start(host)
            if not until(lambda: trains_whole(cluster, 0), PERSON_S):
                record["person"] = "it did not start"
            while not record["person"] and len(record["faults"]) < count:
                record["person"] = inject(cluster, chance, deck, record["faults"])
            if not record["person"]:
                record["person"] = stop(cluster)
            if record["person"]:
                cluster.show_stacks()
        finally:
            cluster.end()
        record["sessions"] = len(cluster.sessions())
        if not record["person"]:
            parts = segments(cluster.sessions(), cluster.last_step())
            record["steps"] = parts[-1].last
            record["segments"] = [[p.last - p.first + 1, p.world_size] for p in parts]
            reference = out.parent / "reference"
            train(reference, cluster.options, parts, cluster.training)
            record["wrong"] = differences(out, reference, parts[-1].last)
        if keep and (record["person"] or record["wrong"]):
            for each in (out, logs):
                shutil.copytree(each, Path(keep) / f"seed-{seed}", dirs_exist_ok=True)
        print(f"run {seed}: {record}", flush=True)
        return record


class Deck:
    """Kinds of faults in random order; each comes once before any comes again."""

    def __init__(self, kinds: Sequence[str], chance: random.Random) -> None:
        self._kinds, self._chance = list(kinds), chance
        self._left: list[str] = []
        self.several = len(self._kinds) > 1

    def draw(self, without: Sequence[str] = ()) -> str:
        """The next kind, which is none of ``without``."""
        if not set(self._left) - set(without):
            self._left = self._chance.sample(self._kinds, len(self._kinds)) + self._left
        kind = next(k for k in self._left if k not in without)
        self._left.remove(kind)
        return kind


@contextmanager
def file_system(mb: int) -> Iterator[Path]:
    """One of its own, small enough to be filled."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        subprocess.run(("mount", "-t", "tmpfs", "-o", f"size={mb}m", "tmpfs", folder), check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(("umount", "-l", folder), check=True)


def trains_whole(cluster: Cluster, after: int, since: float = 0.0) -> bool:
    """Whether the newest start is later than ``after`` starts, has all ranks, and has trained."""
    sessions = cluster.sessions()
    if len(sessions) <= after or sessions[-1]["world_size"] != 2 * len(cluster.training):
        return False
    newest = sessions[-1]
    return newest["time"] > since and cluster.last_step() > newest["resumed_after"] + 2


def inject(
    cluster: Cluster, chance: random.Random, deck: Deck, faults: list[dict[str, Any]]
) -> str:
    """A fault, or two of which the second hits while the first is mended; why it needs a person."""
    time.sleep(chance.uniform(0.1, 3))
    number = 2 if deck.several and chance.random() < 0.2 else 1
    heals: list[tuple[float, Heal]] = []
    began, before = time.time(), len(cluster.sessions())
    step = cluster.last_step()
    broken = []
    for i in range(number):
        kind = deck.draw(broken)
        broken.append(kind)
        if i:
            time.sleep(chance.uniform(0, 6))
        heal = FAULTS[kind](cluster, chance)
        if heal is not None:
            heals.append((time.time() + chance.uniform(1, 15), heal))
    again_s = whole_s = None
    end = time.time() + PERSON_S
    healed = began
    # Some faults cost no start: a full disk; a link that comes back before anybody gives up.
    quiet_s = 12.0
    restarts = True
    print(f"{began:.1f} step {step}: {' and '.join(broken)}", flush=True)
    while whole_s is None:
        now = time.time()
        for due, heal in list(heals):
            if now >= due:
                heal()
                heals.remove((due, heal))
                healed = time.time()
        sessions = cluster.sessions()
        trains = len(sessions) > before and cluster.last_step() > sessions[-1]["resumed_after"]
        if again_s is None and trains:
            again_s = time.time() - began
        if not heals and trains_whole(cluster, before):
            whole_s = time.time() - healed
        elif not heals and len(sessions) == before and now > healed + quiet_s:
            goes_on = cluster.last_step() > step + 5 and cluster.commit() > step
            restarts, whole_s = not goes_on, 0.0 if goes_on else None
        if now > end and whole_s is None:
            return f"{' and '.join(broken)}: not whole again after {PERSON_S:.0f} s"
        time.sleep(0.05)
    lost = [session["lost_steps"] for session in cluster.sessions()[before:]]
    origins = [session["origin"] for session in cluster.sessions()[before:]]
    for i, kind in enumerate(broken):
        faults.append({"kind": kind, "with": [k for k in broken if k != kind], "step": step})
        if not i:
            faults[-1] |= {"again_s": again_s, "whole_s": whole_s, "restarts": restarts}
            faults[-1] |= {"starts": len(lost), "lost_steps": sum(lost), "from": origins}
    return ""


def stop(cluster: Cluster) -> str:
    """Ask the run to save and end; why it did not."""
    for pid in cluster.workers(cluster.training[0]):
        os.kill(pid, signal.SIGUSR1)
    if not until(lambda: not cluster.workers(cluster.training[1]), 60):
        return "it did not end when asked to"
    return ""


def summary(record: dict[str, Any]) -> str:
    """How all runs ended, in a sentence."""
    runs = record["runs"]
    persons = [each["person"] for each in runs if each["person"]]
    wrong = [each for each in runs if each["wrong"]]
    return (
        f"{sum(len(each['faults']) for each in runs)} faults in {len(runs)} runs; "
        f"{len(persons)} runs needed intervention, {len(wrong)} ended with wrong results"
    )


def page_table(record: dict[str, Any]) -> list[str]:
    """The lines of the page's table: faults that no other one overlapped with, by kind."""
    faults = [f for each in record["runs"] for f in each["faults"] if not f["with"]]
    header = ["fault", "interrupted training", "s to the next step (longest)"]
    header += ["s until all ranks train", "from memory", "steps lost (most)"]
    lines = [row(header), row(["---", *["---:"] * 5])]
    for kind in FAULTS:
        of_kind = [fault for fault in faults if fault["kind"] == kind]
        if not of_kind:
            continue
        stopped = [fault for fault in of_kind if fault["restarts"]]
        again = [f["again_s"] for f in stopped if f["again_s"] is not None]
        cells = ["-"] * 4
        if again:
            lost = [f["lost_steps"] for f in stopped]
            cells = [
                f"{statistics.median(again):.0f} ({max(again):.0f})",
                f"{statistics.median(f['whole_s'] for f in stopped):.0f}",
                f"{sum(f['from'][0] == 'memory' for f in stopped)} of {len(stopped)}",
                f"{statistics.median(lost):g} ({max(lost)})",
            ]
        lines.append(row([kind, f"{len(stopped)} of {len(of_kind)}", *cells]))
    return lines


def table(record: dict[str, Any]) -> list[str]:
    """The lines to print: a row per kind of fault."""
    faults = [fault for each in record["runs"] for fault in each["faults"]]
    lines = [
        row(
            [
                *("fault", "number", "alone", "s until training", "longest", "s until whole"),
                *("from memory", "steps lost", "most"),
            ]
        ),
        row(["---", *["---:"] * 8]),
    ]
    for kind in FAULTS:
        of_kind = [fault for fault in faults if fault["kind"] == kind]
        alone = [f for f in of_kind if not f["with"] and f.get("restarts")]
        if not of_kind:
            continue
        again = [f["again_s"] for f in alone if f["again_s"] is not None]
        cells = ["-"] * 6
        if again:
            cells = [
                f"{statistics.median(again):.1f}",
                f"{max(again):.1f}",
                f"{statistics.median(f['whole_s'] for f in alone):.1f}",
                f"{sum(f['from'][0] == 'memory' for f in alone)} of {len(alone)}",
                f"{statistics.median(f['lost_steps'] for f in alone):g}",
                str(max(f["lost_steps"] for f in alone)),
            ]
        lines.append(row([kind, str(len(of_kind)), str(len(alone)), *cells]))
    return lines


if __name__ == "__main__":
    sys.exit(main())
