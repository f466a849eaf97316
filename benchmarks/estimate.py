"""Prediction beside measurement: what `fsdp2.estimate` says and what a run does.

Every case trains a model on ranks over gloo under a `Ledger`, which counts the bytes of all live
tensors after every operation, and counts the bytes of the messages that are sent. The estimate sees
only the model on the meta device. Writes benchmarks/results/estimate.json and prints a table.

    python -m benchmarks.estimate [--quick]
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import FSDPModule, MixedPrecisionPolicy
from fsdp2.api.shard_model import shard_model
from fsdp2.optim import dtensor_step
from fsdp2.planning import Sharding, Workload, estimate
from fsdp2.planning.trace.checkpointing import apply_checkpointing
from fsdp2.planning.workload import default_checkpoint_modules
from fsdp2.wrap import units_of

from . import machine
from .families import FAMILIES, Family
from .ledger import Ledger
from .ranks import progress, run_ranks
from .report import row, write_readme, write_record
from .transport import BETWEEN, KINDS, around_waits, counting_sent, pretended_hosts

WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        mesh: shape of the mesh.
        reshard: ``reshard_after_forward`` of all units but the root.
        checkpointing: "none", "full" or "selective".
        accumulation: of micro-batches, as in `estimate`.
        granularity: ``shard_granularity`` of all parameters.
        ranks_per_node: ranks on each of several hosts, which are pretended; None: all on one.
    """

    family: str
    mesh: tuple[int, ...] = (2,)
    wrap: str = "auto"
    bf16: bool = False
    reshard: bool | int | None = None
    checkpointing: str = "none"
    micro_batches: int = 1
    accumulation: str = "unsharded"
    optimizer: str = "adamw"
    strategy: str = "full"
    replicate_below: int = 0
    prefetch: int = 1
    max_gathered_bytes: int | None = None
    granularity: int = 1
    ranks_per_node: int | None = None

    @property
    def num_ranks(self) -> int:
        return torch.Size(self.mesh).numel()

    @property
    def name(self) -> str:
        parts = [self.family, f"{' x '.join(map(str, self.mesh))} ranks"]
        parts += ["bf16"] * self.bf16
        if self.ranks_per_node is not None:
            parts.append(f"{self.ranks_per_node} on each host")
        if self.reshard is not None:
            parts.append(f"reshard {self.reshard}")
        if self.wrap != "auto":
            parts.append(f"wrap {self.wrap}")
        if self.checkpointing != "none":
            parts.append(f"{self.checkpointing} checkpointing")
        if self.micro_batches > 1:
            parts.append(f"{self.micro_batches} micro-batches")
        if self.accumulation != "unsharded":
            parts.append(_ACCUMULATION[self.accumulation])
        if self.strategy != "full":
            parts.append(f"strategy {self.strategy}")
        if self.replicate_below:
            parts.append(f"small ones replicated (under {self.replicate_below} bytes)")
        if self.prefetch > 1:
            parts.append(f"prefetch {self.prefetch}")
        if self.max_gathered_bytes is not None:
            parts.append(f"budget {self.max_gathered_bytes}")
        if self.granularity > 1:
            parts.append(f"blocks of {self.granularity} rows")
        if self.optimizer != "adamw":
            parts.append(self.optimizer)
        return ", ".join(parts)


_ACCUMULATION = {"sharded": "accumulated sharded", "every": "reduced in every one"}
MAIN = [Case(family, mesh) for family in FAMILIES for mesh in ((2,), (4,))]
MORE = [
    # (Batch norm on the CPU takes no bf16 parameters beside statistics in fp32.)
    *(Case(family, bf16=True) for family in FAMILIES if family != "convolutional"),
    Case("transformer", (2, 2), strategy="hybrid"),
    Case("transformer", strategy="grad"),
    Case("transformer", strategy="none"),
    Case("convolutional", strategy="optimizer", micro_batches=2),
    Case("convolutional", replicate_below=2**20),
    Case("transformer", prefetch=2),
    Case("transformer", (4,), reshard=2),
    Case("transformer", wrap="root"),
    Case("transformer", checkpointing="full"),
    Case("transformer", checkpointing="selective", bf16=True),
    Case("transformer", micro_batches=2),
    Case("transformer", micro_batches=3, bf16=True),
    Case("transformer", micro_batches=2, accumulation="sharded"),
    Case("transformer", micro_batches=3, bf16=True, accumulation="sharded"),
    Case("transformer", micro_batches=3, bf16=True, accumulation="every"),
    Case("recommender", micro_batches=2, accumulation="every"),
    Case("experts", micro_batches=2, wrap="root", accumulation="sharded"),
    Case("transformer", micro_batches=2, strategy="none", accumulation="every"),
    Case("convolutional", micro_batches=2, strategy="optimizer", accumulation="sharded"),
    *(
        Case("transformer", (2, 2), strategy="hybrid", micro_batches=3, accumulation=kind)
        for kind in ("unsharded", "sharded", "every")
    ),
    Case("recommender", optimizer="momentum"),
    Case("experts", checkpointing="full"),
    Case("transformer", (4,), ranks_per_node=2),
    Case("transformer", (4,), bf16=True, ranks_per_node=2),
    Case("recommender", (4,), strategy="none", ranks_per_node=2),
    Case("transformer", (2, 2), strategy="hybrid", ranks_per_node=2),
    Case("transformer", (4,), reshard=2, ranks_per_node=2),
    Case("transformer", (4,), ranks_per_node=1),
]


def compare(case: Case) -> dict[str, Any]:
    """Runs a case and estimates it; rank 0 of each."""
    measured = run_ranks(measure, case.num_ranks, {"case": asdict(case)})
    predicted = predict(case)
    errors = {key: predicted[key] / measured[key] - 1 for key in measured if measured[key]}
    return {
        "case": asdict(case),
        "name": case.name,
        "measured": measured,
        "predicted": predicted,
        "errors": errors,
    }


# -- prediction ----------------------------------------------------------------------------------


def predict(case: Case) -> dict[str, int]:
    """What the estimate says, from the model on the meta device."""
    family = FAMILIES[case.family]
    with torch.device("meta"):
        model = family.model()
    workload = Workload(
        model,
        tuple(t.to("meta") for t in family.batch()),
        loss_fn=family.loss,
        activation_checkpointing=case.checkpointing,
        micro_batches=case.micro_batches,
        accumulation=case.accumulation,
        optimizer=case.optimizer,
    )
    sharding = Sharding(
        case.strategy,
        wrap=case.wrap,
        mp_policy=_policy(case),
        reshard_after_forward=case.reshard,
        replicate_below=case.replicate_below,
        prefetch=case.prefetch,
        max_gathered_bytes=case.max_gathered_bytes,
        shard_granularity=case.granularity,
    )
    nodes = case.ranks_per_node or case.num_ranks
    made = estimate(workload, sharding, case.mesh, device_type="cpu", ranks_per_node=nodes)
    rank = made.ranks[0]
    state = rank.parameters + rank.optimizer + rank.buffers
    sent = dict.fromkeys(KINDS, 0)
    for traffic in made.traffic:
        sent[traffic.kind] += traffic.sent
    return {
        "state": state,
        "gradients": rank.gradients,
        "forward": rank.forward.total,
        "backward": rank.backward.total,
        "step": rank.step.total,
        "peak": rank.peak.total,
        "between": sum(traffic.between_nodes for traffic in made.traffic),
        **sent,
    }


def _policy(case: Case) -> MixedPrecisionPolicy:
    if not case.bf16:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# -- measurement ---------------------------------------------------------------------------------


def measure(case: dict[str, Any]) -> dict[str, int]:
    """Trains on this rank and counts the last step."""
    made = Case(**{**case, "mesh": tuple(case["mesh"])})
    family = FAMILIES[made.family]
    progress(f"measuring: {made.name}")
    names = ("replicate", "shard") if len(made.mesh) == 2 else None
    mesh = init_device_mesh("cpu", made.mesh, mesh_dim_names=names)
    torch.manual_seed(0)  # replicas are equal
    ledger = Ledger(every_operation=False)
    node = made.ranks_per_node or made.num_ranks
    places = [rank // node for rank in range(made.num_ranks)]
    pretended = nullcontext() if made.ranks_per_node is None else pretended_hosts(places)
    with pretended, ledger, around_waits(ledger.paused), counting_sent(places) as sent:
        model = family.model()
        _shard(model, made, mesh)
        optimizer = _optimizer(model, made)
        torch.manual_seed(dist.get_rank())
        batch = family.batch()
        for _ in range(WARM_UP_STEPS):
            _train(model, family, batch, made)
            optimizer.step()
            optimizer.zero_grad()
        ledger.every_operation = True
        sent.clear()
        moments = _train(model, family, batch, made, ledger)
        ledger.sample("step begins")
        moments["step"] = [(len(ledger.live_bytes) - 1, 0)]
        optimizer.step()
        ledger.sample("step ends")
        moments["step"] = [(moments["step"][0][0], len(ledger.live_bytes))]
        gradients = _nbytes(p.grad for p in model.parameters())
        counted = {kind: sent[kind] for kind in KINDS}
        counted["between"] = sum(sent[kind + BETWEEN] for kind in KINDS)
    peaks = {
        phase: max(max(ledger.live_bytes[a:b]) for a, b in spans)
        for phase, spans in moments.items()
    }
    states = (v for s in optimizer.state.values() for v in s.values())
    state = _nbytes(model.parameters()) + _nbytes(states) + _nbytes(model.buffers())
    return {
        "state": state,
        "gradients": gradients,
        **peaks,
        "peak": max(peaks.values()),
        **counted,
    }


def _shard(model: nn.Module, case: Case, mesh: Any) -> None:
    if case.checkpointing != "none":
        for name in default_checkpoint_modules(model, units_of(model, case.wrap)):
            block: Any = model.get_submodule(name)
            block.forward = apply_checkpointing(block.forward, case.checkpointing)
    shard_model(
        model,
        mesh,
        strategy=case.strategy,
        wrap=case.wrap,
        mp_policy=_policy(case),
        reshard_after_forward=case.reshard,
        replicate_below=case.replicate_below,
        prefetch=case.prefetch,
        max_gathered_bytes=case.max_gathered_bytes,
        shard_granularity=case.granularity,
    )
    if case.accumulation == "sharded":
        cast(FSDPModule, model).set_accumulate_sharded(True)


def _optimizer(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    # Of a step on each parameter, as by default on accelerators: see docs/optimizers.md.
    if case.optimizer == "adamw":
        return dtensor_step(torch.optim.AdamW(model.parameters(), lr=1e-3))
    return dtensor_step(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))


def _train(
    model: Any, family: Family, batch: tuple[Tensor, ...], case: Case, ledger: Ledger | None = None
) -> dict[str, list[tuple[int, int]]]:
    """All micro-batches of a step; returns from which to which moment each phase went."""
    moments: dict[str, list[tuple[int, int]]] = {"forward": [], "backward": []}

    def now() -> int:
        if ledger is None:
            return 0
        ledger.sample("between phases")
        return len(ledger.live_bytes) - 1

    for i in range(case.micro_batches):
        if case.accumulation != "every":
            model.set_requires_gradient_sync(i == case.micro_batches - 1)
        start = now()
        loss = family.loss(model(*batch))
        middle = now()
        loss.backward()
        del loss
        end = now()
        moments["forward"].append((start, middle + 1))
        moments["backward"].append((middle, end + 1))
    return moments


def _nbytes(tensors: Any) -> int:
    return sum(getattr(t, "_local_tensor", t).nbytes for t in tensors if isinstance(t, Tensor))


# -- report --------------------------------------------------------------------------------------

COLUMNS = {
    "state": "parameters + optimizer",
    "gradients": "gradients",
    "forward": "peak in forward",
    "backward": "peak in backward",
    "step": "peak in step",
    "sent": "sent",
    "between": "sent to other hosts",
}
# A smaller error, as a part of the measured figure, counts as none.
MET = 0.001
BEGIN, END = "<!-- estimate:begin -->", "<!-- estimate:end -->"


def table(results: list[dict[str, Any]]) -> str:
    """A Markdown table: predicted and measured MB, and the error."""
    lines = [row(["case", *COLUMNS.values()]), row(["---"] * (len(COLUMNS) + 1))]
    for result in results:
        cells = [result["name"]]
        for key in COLUMNS:
            predicted, measured = (_value(result[side], key) for side in ("predicted", "measured"))
            error = f" ({100 * (predicted / measured - 1):+.2f} %)" if measured else ""
            cells.append(f"{predicted / 1e6:.2f} / {measured / 1e6:.2f}{error}")
        lines.append(row(cells))
    return "\n".join(lines)


def digest(results: list[dict[str, Any]]) -> str:
    """A Markdown table: of each figure, how many cases are met, and the largest error."""
    heads = ["figure", "cases", f"within {100 * MET:g} %", "largest error", "in the case"]
    lines = [row(heads), row(["---"] * len(heads))]
    for key, name in COLUMNS.items():
        errors = {}
        for result in results:
            predicted, measured = (_value(result[side], key) for side in ("predicted", "measured"))
            if measured:
                errors[result["name"]] = predicted / measured - 1
        worst = max(errors, key=lambda case: abs(errors[case]))
        met = sum(abs(error) <= MET for error in errors.values())
        case = worst if abs(errors[worst]) > MET else "-"
        error = f"{100 * errors[worst]:+.2f} %".replace("-0.00", "0.00").replace("+0.00", "0.00")
        lines.append(row([name, str(len(errors)), str(met), error, case]))
    return "\n".join(lines)


def _value(numbers: dict[str, int], key: str) -> int:
    if key == "sent":
        return sum(numbers[kind] for kind in ("all_gather", "reduce_scatter", "all_reduce"))
    return numbers[key]


def worst_error(results: list[dict[str, Any]]) -> float:
    """The largest relative error of all cells."""
    return max(abs(error) for result in results for error in result["errors"].values())


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.estimate")
    parser.add_argument("--quick", action="store_true", help="five models on two ranks only")
    parser.add_argument(
        "--output", type=Path, default=machine.REPOSITORY / "benchmarks" / "results", metavar="DIR"
    )
    parser.add_argument("--only-table", action="store_true", help="of the results that are there")
    parser.add_argument("--write-docs", action="store_true", help="into docs/planning/accuracy.md")
    options = parser.parse_args(arguments)
    path = options.output / "estimate.json"
    if not options.only_table:
        cases = [case for case in MAIN if case.mesh == (2,)] if options.quick else MAIN + MORE
        results = [compare(case) for case in cases]
        record = {"name": "estimate", **machine.describe(), "results": results}
        write_record(record, options.output)
    results = json.loads(path.read_text())["results"]
    print(f"{table(results)}\n\n{digest(results)}")
    if options.write_docs:
        page = machine.REPOSITORY / "docs" / "planning" / "accuracy.md"
        write_readme(page, digest(results), BEGIN, END)
    print(f"\nLargest error: {100 * worst_error(results):.2f} %", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
