"""How often each fault of `stream_mutations` changes what a training computes, on the test device.

    cd tests/support && python -m stream_mutations_on_device [--seeds 20] [WORDS OF A NAME ...]

The checker of traces sees every fault in every run, on one process, where values are of no
interest. This is the other side: real ranks, values and delays. Each fault's plan is trained once
per seed of delays; parameters, evaluations and what else a user looks at are compared, bit by bit,
with the same training without the fault.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import fsdp2.sharding.gathered
import harness
import stream_schedules
import testdev
from fsdp2 import CPUOffloadPolicy
from stream_mutations import MUTATIONS, PLANS, Mutation

# Stronger than in other tests: a step has few operators here.
DELAYS = {"probability": 0.2, "max_us": 1500}
SAME, DIFFERENT, RAISED = "same", "different", "raised"


def on_device() -> list[str]:
    """The faults of paths that a device has: not those of messages that the host waits for."""
    return [name for name, mutation in MUTATIONS.items() if not plan_of(mutation).host]


def plan_of(mutation: Mutation) -> stream_schedules.Plan:
    """The plan that shows it; of harmless ones any."""
    return PLANS[mutation.plan or "plain"]


def outcomes(name: str, seeds: int) -> list[str]:
    """What came of each seed, on whichever rank it was worst."""
    size = torch.Size(plan_of(MUTATIONS[name]).mesh).numel()
    of_ranks = harness.run_on(size, outcomes_here, name, seeds, device=testdev.NAME)
    worst = [max(each, key=[SAME, DIFFERENT, RAISED].index) for each in zip(*of_ranks, strict=True)]
    if RAISED in worst:
        harness.stop_all()  # in the middle of something
    return worst


def outcomes_here(name: str, seeds: int) -> list[str]:
    """The body that each rank runs."""
    mutation = MUTATIONS[name]
    plan = plan_of(mutation)
    expected = trained(plan, seed=None)
    found = []
    for seed in range(seeds):
        with mutation.patch():
            try:
                values = trained(plan, seed)
            except RuntimeError:
                found.append(RAISED)
                torch.get_device_module(testdev.NAME).synchronize()
                continue
        alike = all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))
        found.append(SAME if alike else DIFFERENT)
    return found


def trained(plan: stream_schedules.Plan, seed: int | None) -> list[torch.Tensor]:
    """This rank's parameters after the training, with delays of a seed or none."""
    native = testdev.native()
    device = torch.get_device_module(testdev.NAME)
    native.set_delays(seed=seed or 0, **(DELAYS if seed is not None else dict.fromkeys(DELAYS, 0)))
    torch.manual_seed(dist.get_rank())
    with planned(plan), torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        training = stream_schedules.Training(plan, _NoRecorder(device))
        for step in plan.steps:
            training.step(step)
        device.synchronize()
        values = [p.detach() for p in training.model.parameters()]
        values = [getattr(value, "_local_tensor", value).cpu() for value in values]
        values += [kept._local_tensor.cpu() for kept in training.kept]
        return values + [seen.cpu() for seen in training.seen]


@contextmanager
def planned(plan: stream_schedules.Plan) -> Iterator[None]:
    """Models of plans are made on the ranks and the device that there are."""
    pieces = 64 if plan.own_pieces else fsdp2.sharding.gathered.OWN_PIECE_MIN_BYTES

    def mesh_of(shape: tuple[int, ...]) -> Any:
        return harness.cached_mesh(*shape, names=("replicate", "shard")[-len(shape) :])

    with (
        mock.patch.object(fsdp2.sharding.gathered, "OWN_PIECE_MIN_BYTES", pieces),
        mock.patch.object(stream_schedules, "mesh_of", mesh_of),
        # Pinned: copies from and to other memory of the host block anyway.
        mock.patch.object(stream_schedules, "CPUOffloadPolicy", return_value=CPUOffloadPolicy()),
    ):
        yield


class _NoRecorder:
    """What a `Training` asks of a recorder, where nothing is recorded."""

    def __init__(self, device: Any) -> None:
        self.device = self
        self.Event, self.stream = device.Event, device.stream
        self.current_stream = device.current_stream
        self._device = device

    def Stream(self, name: str) -> Any:  # noqa: N802 (as on devices)
        return self._device.Stream()

    def hold(self, *_: Any) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("words", nargs="*", help="run the faults whose names have all of these")
    args = parser.parse_args()
    print(f"| fault | plan | changes what is computed, of {args.seeds} seeds |\n|---|---|---|")
    for name in on_device():
        if not all(word in name for word in args.words):
            continue
        mutation = MUTATIONS[name]
        try:
            counts = Counter(outcomes(name, args.seeds))
            text = f"{counts[DIFFERENT] + counts[RAISED]}"
            if counts[RAISED]:
                text += f" ({counts[RAISED]} raised)"
        except harness.RankError as error:
            text = "hangs" if "hangs" in str(error) else "fails"
            print(error, file=sys.stderr)
        print(f"| {name} | {mutation.plan or '-'} | {text} |", flush=True)
    harness.stop_all()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
