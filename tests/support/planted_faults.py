"""Which planted faults random programs find: ``python -m planted_faults [--only TEXT]``.

With tests/support and the repository on the path. Each fault is one change of the source, made in a
copy of the package. Random programs then run against the copy until one of them fails; printed is
how many that took. A fault that none of them finds is a hole in the grammar, or no fault at all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "fsdp2"


@dataclass(frozen=True)
class Fault:
    """One wrong line.

    Attributes:
        file: below ``fsdp2/``.
        old, new: what is replaced, which occurs once, and by what.
        effect: what users would see.
    """

    effect: str
    file: str
    old: str
    new: str

    def plant(self, package: Path) -> None:
        """Change the file below ``package``.

        Raises:
            ValueError: if ``old`` is not there exactly once: the source has changed.
        """
        path = package / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has this {text.count(self.old)} times: {self.old!r}")
        path.write_text(text.replace(self.old, self.new))


GRADS, REDUCTION = "runtime/unit_grads.py", "runtime/reduction.py"
UNIT, REGISTRATION, ROOT = "runtime/unit.py", "runtime/registration.py", "runtime/root.py"
HOOKS, LAYOUT, BUCKET = "runtime/hooks.py", "sharding/layout.py", "sharding/bucket.py"
RUNS, COMPRESSED, CUSTOM = "optim/flat_runs.py", "comm/compressed.py", "comm/custom.py"

FAULTS = (
    # -- gradients ---------------------------------------------------------------------------
    Fault(
        "gradients of parameters used again in a backward are reduced twice",
        GRADS,
        "                    unsharded.grad = None\n                    if grad.requires_grad:",
        "                    if grad.requires_grad:",
    ),
    Fault(
        "the last micro-batch is lost where others wait in the dtype of the reduction",
        GRADS,
        "earlier.add_(grads[i]) if i in grads else earlier",
        "earlier",
    ),
    Fault(
        "of micro-batches without sync only the last one before the reduction counts",
        GRADS,
        "self.accumulated[id(param)].add_(grad)",
        "self.accumulated[id(param)].copy_(grad)",
    ),
    Fault(
        "gradients that a reset has dropped come back",
        GRADS,
        "        self.accumulated.clear()\n        self.deferred.forget()",
        "        self.deferred.forget()",
    ),
    Fault(
        "set_reduce_unused leaves out parameters that this rank did not use",
        GRADS,
        "            if i not in grads and param.sharded.requires_grad:",
        "            if i not in grads and param.sharded.requires_grad and i:",
    ),
    # -- reductions --------------------------------------------------------------------------
    Fault(
        "gradients of a second backward replace those of the first",
        REDUCTION,
        "local_of(grad).add_(value)",
        "local_of(grad).copy_(value)",
    ),
    Fault(
        "a reduction overwrites attached gradients where one parameter of the unit has none",
        REDUCTION,
        "and (detached is None or len(detached) == len(self.covered))",
        "and (detached is None or len(detached) > 0)",
    ),
    Fault(
        "sums that wait for an all-reduce over replicas are lost",
        REDUCTION,
        "            self.flat[part] += bucket.partial[part]\n",
        "",
    ),
    Fault(
        "of micro-batches whose all-reduce waits only the last one counts",
        REDUCTION,
        "bucket.partial[offset : offset + numel] += self.flat[",
        "bucket.partial[offset : offset + numel] = self.flat[",
    ),
    Fault(
        "set_gradient_divide_factor has no effect",
        REDUCTION,
        "if self.factor is not None and self.factor != self.num_ranks:",
        "if self.factor is not None and self.factor < 0:",
    ),
    Fault(
        "hooks of users on gradients change nothing",
        REDUCTION,
        "            if made is not result:\n                result.copy_(made)\n",
        "",
    ),
    Fault(
        "post-accumulate-grad hooks are not called",
        REDUCTION,
        "                for hook in tuple(hooks.values()):",
        "                for hook in tuple(hooks.values())[:0]:",
    ),
    # -- storage -----------------------------------------------------------------------------
    Fault(
        "every rank casts its shard into the place of rank 0",
        "sharding/gather_plan.py",
        "output[rank * numel : (rank + 1) * numel]",
        "output[:numel]",
    ),
    Fault(
        "packed gradients of dims other than 0 are rank 0's for all",
        "sharding/reduce_plan.py",
        "piece = grad.narrow(slot.dim, start, stop - start)",
        "piece = grad.narrow(slot.dim, 0, stop - start)",
    ),
    Fault(
        "the last rows of uneven dims belong to nobody",
        LAYOUT,
        "return start, min(start + self.chunk, size)",
        "return start, min(start + self.chunk, size - (size % 2 and rank > 1))",
    ),
    Fault(
        "0-dim parameters are read beside their place in the pack",
        "sharding/gather_plan.py",
        "rows = pack.narrow(1, first.shard_offset - layout.pack_offset, len(group) * numel)",
        "rows = pack.narrow(1, 0, len(group) * numel)",
    ),
    Fault(
        "a frozen unit that stays gathered computes with weights of before a load",
        BUCKET,
        "return self.cache_valid and self._versions() == self._cached_versions",
        "return self.cache_valid",
    ),
    Fault(
        "the same for writes by operators on DTensors",
        BUCKET,
        "return self._versions()[1] != self._cached_versions[1]",
        "return False",
    ),
    # -- units -------------------------------------------------------------------------------
    Fault(
        "after a move or load the unit gathers from the old storage",
        UNIT,
        "if param_group.dirty or not param_group.materialized:",
        "if not param_group.materialized:",
    ),
    Fault(
        "parameters that were frozen or thawed train as before",
        UNIT,
        "if not in_backward and param_group.follow_freezing():",
        "if not in_backward and not param_group.params:",
    ),
    Fault(
        "a unit that stays gathered computes with weights of before the step",
        UNIT,
        "return self.param_group.versions() != self._versions",
        "return False",
    ),
    Fault(
        "a unit that was partly freed is copied to its secondary shards",
        UNIT,
        "to_secondary = to_secondary and self.state is State.UNSHARDED",
        "to_secondary = bool(to_secondary)",
    ),
    Fault(
        "units of several modules reduce only the gradients of the last one",
        ROOT,
        "        if runs_next and len(unit.modules) > 1:\n            return",
        "        if runs_next and len(unit.modules) > 99:\n            return",
    ),
    Fault(
        "backward(create_graph=True) frees what a second backward needs",
        ROOT,
        "return unit.config.reshard_after_backward and not self.creates_graph",
        "return unit.config.reshard_after_backward",
    ),
    Fault(
        "a forward that raised inside of another unit's leaves units running",
        ROOT,
        "            if not any(module in running for module in unit.modules):",
        "            if not running:",
    ),
    # -- iterations that are dropped, or ended by hand ---------------------------------------
    Fault(
        "zero_grad leaves sums that wait for an all-reduce",
        ROOT,
        "gradients.holds_partial_sums = not config.all_reduce_grads",
        "gradients.holds_partial_sums = False",
    ),
    Fault(
        "zero_grad leaves gradients of micro-batches that no reduction has taken",
        ROOT,
        "gradients.holds_earlier = leave or not config.reduce_grads",
        "gradients.holds_earlier = False",
    ),
    Fault(
        "reset_iter_state leaves gradients that are attached",
        ROOT,
        "                param.sharded.grad = None\n        # After a failed forward",
        "                pass\n        # After a failed forward",
    ),
    Fault(
        "gradients of a backward that raised stay attached",
        REDUCTION,
        "        for param in self.attached:\n            param.grad = None\n",
        "",
    ),
    Fault(
        "what an earlier backward of a failed iteration has left is reduced with the next one",
        ROOT,
        "            for unit in self.units:\n                unit.gradients.drop()\n",
        "",
    ),
    Fault(
        "finalize_backward leaves gradients to a later iteration",
        "runtime/by_hand.py",
        "    finalization.reducing = True\n",
        "    finalization.reducing = False\n",
    ),
    # -- communication -----------------------------------------------------------------------
    Fault(
        "hooks on reduced gradients are not called",
        REDUCTION,
        "            if self.hook is not None:\n                for part in self._ranges():",
        "            if self.hook is not None:\n                for part in ():",
    ),
    Fault(
        "a custom reduce-scatter that sums gives sums for means",
        CUSTOM,
        "            mean.finish([out])\n",
        "",
    ),
    Fault(
        "a custom all-gather leaves packed parameters in the pack",
        CUSTOM,
        "            plan.unpack()\n",
        "",
    ),
    Fault(
        "in few bytes, a rank's own gradients do not count on the shard that it owns",
        COMPRESSED,
        "                        total.add_(mine)",
        "                        total.add_(mine, alpha=0)",
    ),
    Fault(
        "error feedback adds whole gradients to the next ones",
        COMPRESSED,
        "        row.add_decoded(rows, residuals, times=-1)\n",
        "",
    ),
    Fault(
        "larger shards of reshard_after_forward=int are those of another rank",
        BUCKET,
        "rank = self.rank % secondary.num_shards",
        "rank = (self.rank + 1) % secondary.num_shards",
    ),
    # -- memory ------------------------------------------------------------------------------
    Fault(
        "a limit on gathered bytes frees units in whose forward another one runs",
        "runtime/gather_budget.py",
        "if unit.running or unit.backward_began or unit.weight_grads_deferred:\n            return",
        "if unit.backward_began or unit.weight_grads_deferred:\n            return",
    ),
    Fault(
        "frozen parameters that were kept gathered count as current when planned anew",
        UNIT,
        "        for bucket in held:\n            bucket.cache_valid = False\n",
        "",
    ),
    Fault(
        "frozen parameters are kept gathered after they are thawed",
        "runtime/frozen_cache.py",
        "not nbytes or any(param.sharded.requires_grad for param in bucket.params)",
        "not nbytes",
    ),
    # -- optimizers, copies ------------------------------------------------------------------
    Fault(
        "flat_step gives all parameters of a run the state of the first",
        RUNS,
        "        start = self.offsets[i]\n",
        "        start = self.offsets[0]\n",
    ),
    Fault(
        "flat_step joins parameters whose counts of steps differ",
        RUNS,
        "entries.append((key, value.dtype, value.device, numbers[id(value)]))",
        "entries.append((key, value.dtype, value.device))",
    ),
    Fault(
        "flat_step steps parameters without gradients beside others that have some",
        RUNS,
        "return not self.active and not all(missing)",
        "return False",
    ),
    Fault(
        "a copy of what was frozen while gathered trains",
        "api/deepcopy.py",
        "    unit.param_group.take_freezing()  # done to what is gathered\n",
        "",
    ),
    Fault(
        "offload_optimizer loses what a step made anew",
        "offload/paging.py",
        "                made[key] = value\n            elif",
        "                pass\n            elif",
    ),
    # -- registration and hooks --------------------------------------------------------------
    Fault(
        "functional_call leaves its tensors in units that stay gathered",
        REGISTRATION,
        "        if self.registered != self.registered_before:\n            self.register(",
        "        if not self.registered:\n            self.register(",
    ),
    Fault(
        "what functional_call lent is put back after it has returned",
        REGISTRATION,
        "        if not in_functional_call():\n            self._lent = []",
        "        if not in_functional_call():\n            pass",
    ),
    Fault(
        "parameters that users replaced are taken away without a word",
        REGISTRATION,
        "        if self.check_is_due:\n            self.check()",
        "        if self.check_is_due:\n            self.check_is_due = False",
    ),
    Fault(
        "mixed precision does not cast keyword arguments",
        HOOKS,
        "            args, kwargs = map_tensors(self._cast_input, (args, kwargs))\n"
        "        return args, kwargs\n\n    def post_forward",
        "            args = map_tensors(self._cast_input, args)\n"
        "        return args, kwargs\n\n    def post_forward",
    ),
    Fault(
        "outputs keep the dtype of computation",
        HOOKS,
        "        if self._cast_output is not None:\n"
        "            return map_tensors(self._cast_output, output)\n        return output",
        "        return output",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose effect or file has this text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", type=int, default=60, help="at most, for each fault")
    parser.add_argument("--minutes", type=float, default=6, help="at most, for each fault")
    parser.add_argument("--stop-after", type=float, default=1e9, help="minutes; no new fault then")
    parser.add_argument("--results", type=Path, help="a JSON file: faults that it has are skipped")
    parser.add_argument("--table", type=Path, help="write all of --results there, as Markdown")
    options = parser.parse_args()
    until_s = time.monotonic() + 60 * options.stop_after
    results: dict[str, Any] = {}
    if options.results is not None and options.results.exists():
        results = json.loads(options.results.read_text())
    for fault in FAULTS:
        if options.only not in fault.effect and options.only not in fault.file:
            continue
        if fault.effect in results or time.monotonic() > until_s:
            continue
        number, message = programs_until_found(
            fault, programs=options.programs, minutes=options.minutes, seed=options.seed
        )
        results[fault.effect] = {
            "file": fault.file,
            "program": None if number is None else number + 1,
            "told": message.strip(),
        }
        told = "not found" if number is None else f"found by program {number + 1}"
        print(f"{fault.file}: {fault.effect}: {told}{message}", flush=True)
        if options.results is not None:
            options.results.write_text(json.dumps(results, indent=1) + "\n")
    found = [each["program"] for each in results.values() if each["program"] is not None]
    print(f"{len(found)} of {len(results)} found, by {sum(found)} programs")
    if options.table is not None:
        options.table.write_text(table(results))


def table(results: dict[str, Any]) -> str:
    """The results in the order of `FAULTS`, as a page."""
    known = [(fault, results[fault.effect]) for fault in FAULTS if fault.effect in results]
    found = sum(result["program"] is not None for _, result in known)
    lines = [
        "# Planted faults",
        "",
        "Written by `python -m planted_faults --table`. Each fault is one wrong line in a copy of",
        "the package; random programs run against it until one fails.",
        f"{found} of {len(known)} are found.",
        "",
        "| file | effect | found by program |",
        "|---|---|---|",
    ]
    for fault, result in known:
        number = result["program"] or f"not found {result['told']}"
        lines.append(f"| `{fault.file}` | {fault.effect} | {number} |")
    return "\n".join(lines) + "\n"


def programs_until_found(
    fault: Fault, *, programs: int, minutes: float, seed: int
) -> tuple[int | None, str]:
    """The number of the first program that fails, if any does, and its error."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(
            PACKAGE, Path(folder, "fsdp2"), ignore=shutil.ignore_patterns("__pycache__")
        )
        fault.plant(Path(folder, "fsdp2"))
        paths = (folder, str(REPOSITORY / "tests/support"), str(REPOSITORY))
        command = ["-m", "program_runs", "--seeds", str(seed), "--first-failure"]
        command += ["--programs", str(programs), "--minutes", str(minutes)]
        ran = subprocess.run(
            [sys.executable, *command],
            cwd=folder,  # `fsdp2` is the copy there
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
        )
    found = re.search(r"^program (\d+):", ran.stdout, re.MULTILINE)
    if found is None:
        if ran.returncode or "0 failed" not in ran.stdout:
            raise RuntimeError(f"The programs did not run:\n{ran.stdout}\n{ran.stderr}")
        ended = re.search(r"(\d+) programs, 0 failed", ran.stdout)
        return None, f" by {ended[1]} programs" if ended else ""
    errors = re.findall(r"^(\w+(?:Error|Exception)\b.*|.*\b(?:died|hung)\b.*)$", ran.stdout, re.M)
    return int(found[1]), f" ({errors[-1].strip()[:90]})" if errors else ""


if __name__ == "__main__":
    main()
