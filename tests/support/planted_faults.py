"""Which planted faults are found: ``python -m planted_faults [--only TEXT]``.

With tests/support and the repository on the path. Each fault is one change of the source, made in a
copy of the package. Random programs then run against the copy until one of them fails; printed is
how many that took. A fault that programs of all kinds do not find is looked for by programs of the
families of operations that it is about: if these do not find it, it is a hole in the grammar, or no
fault at all. And of the fixed tests, the one that is named with the fault must fail.
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
from collections.abc import Sequence
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
        test: a fixed test that fails with it.
        families: of operations (`program_grammar.FAMILIES`) that it takes.
    """

    effect: str
    file: str
    old: str
    new: str
    test: str = ""
    families: tuple[str, ...] = ()

    def planted_in(self, folder: Path) -> None:
        """Make a copy of the package with it there.

        Raises:
            ValueError: if ``old`` is not there exactly once: the source has changed.
        """
        package = folder / "fsdp2"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        path = package / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has this {text.count(self.old)} times: {self.old!r}")
        path.write_text(text.replace(self.old, self.new))


GRADS, REDUCTION = "runtime/unit_grads.py", "runtime/reduction.py"
UNIT, REGISTRATION, ROOT = "runtime/unit.py", "runtime/registration.py", "runtime/runtime.py"
HOOKS, LAYOUT, BUCKET = "runtime/hooks.py", "sharding/layout.py", "sharding/bucket.py"
GRADIENTS = "sharding/gradients.py"
SECONDARY = "features/secondary_shards.py"
RUNS, COMPRESSED, CUSTOM = (
    "optim/flat_runs.py",
    "transports/compressed/transports.py",
    "transports/custom.py",
)

FAULTS = (
    # -- gradients ---------------------------------------------------------------------------
    Fault(
        "gradients of parameters used again in a backward are reduced twice",
        GRADS,
        "                    unsharded.grad = None\n                    if grad.requires_grad:",
        "                    if grad.requires_grad:",
        test="tests/core/test_backward_calls.py::test_gradients_are_those_of_one_process",
    ),
    Fault(
        "micro-batches before the last one are lost where they are added up in another dtype",
        GRADS,
        "unsharded.grad_dtype, self.sums = None, True",
        "unsharded.grad, self.sums = None, True",
        test="tests/core/test_mixed_precision.py::test_accumulation",
    ),
    Fault(
        "sums of micro-batches are lost where a unit is planned anew between two of them",
        "sharding/param.py",
        "if before is not None and before.grad is not None:",
        "if before is None and before is not None:",
        test="tests/core/test_replanning.py::test_micro_batches_before_a_move_or_cast_count",
    ),
    Fault(
        "gradients that a reset has dropped come back",
        GRADS,
        "                param.unsharded.grad = None\n        for bucket",
        "                pass\n        for bucket",
        test="tests/core/test_recovery.py"
        "::test_a_backward_that_raises_in_an_accumulation_is_not_silent",
    ),
    Fault(
        "set_reduce_unused leaves out parameters that this rank did not use",
        "features/unused_parameters.py",
        "if i not in grads and (",
        "if i and i not in grads and (",
        test="tests/core/test_methods.py::test_ranks_that_use_different_parameters_of_a_unit",
    ),
    Fault(
        "what is frozen between a forward and its backward gets a gradient",
        ROOT,
        "unit.param_group.show_freezing(midway=True)",
        "pass",
        test="tests/core/test_frozen_midway.py"
        "::test_what_is_frozen_after_its_forward_gets_no_gradient",
        families=("graphs",),
    ),
    # -- reductions --------------------------------------------------------------------------
    Fault(
        "gradients of a second backward replace those of the first",
        REDUCTION,
        "local_of(grad).add_(value)",
        "local_of(grad).copy_(value)",
        test="tests/core/test_accumulation.py::test_without_communication",
    ),
    Fault(
        "a reduction overwrites attached gradients where one parameter of the unit has none",
        REDUCTION,
        "and (detached is None or len(detached) == len(covered))",
        "and (detached is None or len(detached) > 0)",
        test="tests/core/test_gradients.py::test_one_gradient_removed_by_the_user",
    ),
    Fault(
        "sums that wait for an all-reduce over replicas are lost",
        GRADIENTS,
        "            sums[part] += flat[part]\n",
        "",
        test="tests/core/test_hsdp.py::test_accumulation_with_reduce_scatter_only",
    ),
    Fault(
        "of micro-batches whose all-reduce waits only the last one counts",
        GRADIENTS,
        "self.flat[offset : offset + numel] += sums[",
        "self.flat[offset : offset + numel] = sums[",
        test="tests/core/test_hsdp.py::test_accumulation_with_reduce_scatter_only",
    ),
    Fault(
        "set_gradient_divide_factor has no effect",
        REDUCTION,
        "if self.factor is not None and self.factor != num_ranks:",
        "if self.factor is not None and self.factor < 0:",
        test="tests/core/test_methods.py::test_the_former_name_of_the_divide_factor",
    ),
    Fault(
        "hooks of users on gradients change nothing",
        REDUCTION,
        "                result.copy_(result_hooks[-1](param, given))",
        "                result_hooks[-1](param, given)",
        test="tests/core/test_parameter_hooks.py"
        "::test_hooks_registered_before_sharding_are_called_with_sharded_gradients",
    ),
    Fault(
        "post-accumulate-grad hooks are not called",
        REDUCTION,
        "                for hook in tuple(hooks.values()):",
        "                for hook in tuple(hooks.values())[:0]:",
        test="tests/core/test_parameter_hooks.py"
        "::test_hooks_registered_before_sharding_are_called_with_sharded_gradients",
    ),
    # -- storage -----------------------------------------------------------------------------
    Fault(
        "every rank casts its shard into the place of rank 0",
        "sharding/gathered.py",
        "output[rank * numel : (rank + 1) * numel]",
        "output[:numel]",
        test="tests/core/test_mixed_precision.py::test_bf16_compute_with_fp32_reduction",
    ),
    Fault(
        "packed gradients of dims other than 0 are rank 0's for all",
        "sharding/gradients.py",
        "piece = grad.narrow(slot.dim, start, stop - start)",
        "piece = grad.narrow(slot.dim, 0, stop - start)",
        test="tests/core/test_parameters.py::test_placements_chosen_by_a_function",
    ),
    Fault(
        "the last rows of uneven dims belong to nobody",
        LAYOUT,
        "return start, min(start + self.chunk, size)",
        "return start, min(start + self.chunk, size - (size % 2 and rank > 1))",
        test="tests/core/test_parameters.py::test_names_and_layout",
    ),
    Fault(
        "0-dim parameters are read beside their place in the pack",
        "sharding/gathered.py",
        "rows = pack.narrow(1, first.shard_offset - layout.pack_offset, len(group) * numel)",
        "rows = pack.narrow(1, 0, len(group) * numel)",
        test="tests/core/test_parameters.py::test_parameter_objects_stay_the_same_over_steps",
    ),
    Fault(
        "a frozen unit that stays gathered computes with rows of before a write",
        "features/frozen_cache.py",
        "if bucket.versions() != _gathered_at[bucket]]",
        "if bucket not in _gathered_at]",
        test="tests/core/test_frozen_kept.py::test_changes_are_seen",
        families=("freezing",),
    ),
    Fault(
        "the same for writes by operators on DTensors",
        "features/frozen_cache.py",
        "if b.versions()[1] != _gathered_at[b][1]]",
        "if b not in _gathered_at]",
        test="tests/core/test_frozen_kept.py::test_shards_written_between_forward_and_backward",
        families=("freezing",),
    ),
    # -- units -------------------------------------------------------------------------------
    Fault(
        "after a move or load the unit gathers from the old storage",
        UNIT,
        "if param_group.dirty or not param_group.materialized:",
        "if not param_group.materialized:",
        test="tests/core/test_methods.py::test_units_that_did_not_run_take_part_with_zeros",
        families=("models", "weights"),
    ),
    Fault(
        "parameters that were frozen or thawed train as before",
        UNIT,
        "if not in_backward and param_group.freezing.adopt():",
        "if not in_backward and not param_group.params:",
        test="tests/core/test_frozen_lora.py::test_parameters_are_frozen_and_thawed_between_steps",
    ),
    Fault(
        "a unit that stays gathered computes with weights of before the step",
        UNIT,
        "return self.param_group.versions() != self.gather.versions",
        "return False",
        test="tests/core/test_reshard.py"
        "::test_what_two_ranks_keep_for_backward_is_not_used_after_a_write",
        families=("memory",),
    ),
    Fault(
        "larger shards of reshard_after_forward=int are not written",
        SECONDARY,
        "        torch._foreach_copy_(self._padded, self.keep)\n",
        "        pass\n",
        test="tests/core/test_reshard.py::test_parameters_are_kept_on_two_ranks_after_forward",
        families=("memory",),
    ),
    Fault(
        "units of several modules are reduced once for each module",
        ROOT,
        "        if runs_next and len(unit.modules) > 1:\n            return",
        "        if runs_next and len(unit.modules) > 99:\n            return",
        test="tests/core/test_modules.py::test_a_unit_of_several_modules_is_reduced_once",
    ),
    Fault(
        "what a second backward reads is freed, and gathered again",
        "runtime/schedule.py",
        "return unit.config.reshard_after_backward and not backward.creates_graph",
        "return unit.config.reshard_after_backward",
        test="tests/core/test_double_backward.py"
        "::test_a_penalty_on_the_gradient_that_a_backward_has_left_on_the_input",
        families=("graphs",),
    ),
    Fault(
        "a forward that raised inside of another module leaves units running",
        ROOT,
        "            if not any(module in running for module in unit.modules):",
        "            if not running:",
        test="tests/core/test_recovery.py"
        "::test_a_backward_after_a_forward_that_raised_inside_of_another_module",
        families=("failures",),
    ),
    # -- iterations that are dropped, or ended by hand ---------------------------------------
    Fault(
        "zero_grad leaves sums that wait for an all-reduce",
        ROOT,
        "gradients.holds_partial_sums = not config.all_reduce_grads",
        "gradients.holds_partial_sums = False",
        test="tests/core/test_hsdp.py::test_zero_grad_drops_sums_that_wait_for_an_all_reduce",
    ),
    Fault(
        "sums of micro-batches travel in the dtype of computation",
        ROOT,
        "gradients.holds_earlier = leave or not config.reduce_grads",
        "gradients.holds_earlier = False",
        test="tests/core/test_mixed_precision.py"
        "::test_sums_of_micro_batches_travel_in_the_dtype_of_the_reduction",
        families=("accumulation",),
    ),
    Fault(
        "reset_iter_state leaves gradients that are attached",
        ROOT,
        "                param.sharded.grad = None\n        # After a failed forward",
        "                pass\n        # After a failed forward",
        test="tests/core/test_recovery.py"
        "::test_reset_by_hand_drops_what_micro_batches_have_accumulated",
    ),
    Fault(
        "gradients of a backward that raised stay attached",
        REDUCTION,
        "        for param in self.attached:\n            param.grad = None\n",
        "",
        test="tests/core/test_recovery.py"
        "::test_gradients_that_a_backward_had_attached_before_it_raised_are_dropped",
        families=("failures", "memory"),
    ),
    Fault(
        "what an earlier backward of a failed iteration has left is reduced with the next one",
        ROOT,
        "            for unit in self.units:\n                self.drop_gradients(unit)\n",
        "",
        test="tests/core/test_recovery.py"
        "::test_a_backward_that_raises_in_an_accumulation_is_not_silent",
    ),
    Fault(
        "finalize_backward leaves gradients to a later iteration",
        "features/finalization.py",
        "runtime.held_open, runtime.is_last_backward = False, True\n",
        "runtime.held_open, runtime.is_last_backward = True, True\n",
        test="tests/core/test_finalization.py::test_micro_batches_without_sync",
        families=("accumulation",),
    ),
    # -- communication -----------------------------------------------------------------------
    Fault(
        "hooks on reduced gradients are not called",
        REDUCTION,
        "in self.output.ranges(self.plan):\n                        self.hook(part)",
        "in ():\n                        self.hook(part)",
        test="tests/core/test_methods.py::test_the_hook_sees_and_changes_reduced_gradients",
        families=("gradients",),
    ),
    Fault(
        "a custom reduce-scatter that sums gives sums for means",
        CUSTOM,
        "            mean.finish([out])\n",
        "",
        test="tests/core/test_custom_collectives.py::test_sums_only",
        families=("communication",),
    ),
    Fault(
        "a custom all-gather leaves packed parameters in the pack",
        CUSTOM,
        "            plan.unpack()\n",
        "",
        test="tests/core/test_custom_collectives.py::test_training",
    ),
    Fault(
        "in few bytes, a rank's own gradients do not count on the shard that it owns",
        COMPRESSED,
        "                        total.add_(mine)",
        "                        total.add_(mine, alpha=0)",
        test="tests/core/test_comm_policy.py::test_gradients_are_off_by_half_a_scale_at_most",
    ),
    Fault(
        "error feedback adds whole gradients to the next ones",
        COMPRESSED,
        "        row.add_decoded(rows, residuals, times=-1)\n",
        "",
        test="tests/core/test_comm_policy.py::test_replicated_parameters_of_any_size",
    ),
    Fault(
        "larger shards of reshard_after_forward=int are those of another rank",
        SECONDARY,
        "self._rank = bucket.rank % size",
        "self._rank = (bucket.rank + 1) % size",
        test="tests/core/test_reshard.py::test_parameters_are_kept_on_two_ranks_after_forward",
        families=("memory",),
    ),
    # -- memory ------------------------------------------------------------------------------
    Fault(
        "a unit is gathered beside as much as the limit on gathered bytes allows",
        "features/gather_budget.py",
        "self._free_until(self.max_bytes - needed, unit)",
        "self._free_until(self.max_bytes, unit)",
        test="tests/core/test_gather_budget.py::test_the_budget_holds_and_results_are_the_same",
    ),
    Fault(
        "frozen parameters that were kept gathered count as current when planned anew",
        UNIT,
        "        for bucket in held:\n            bucket.cache_valid = False\n",
        "        for bucket in held:\n",
        test="tests/core/test_frozen_kept.py::test_another_choice_between_forward_and_backward",
        families=("freezing", "models"),
    ),
    Fault(
        "frozen parameters are kept gathered after they are thawed",
        "features/frozen_cache.py",
        "not nbytes or any(param.sharded.requires_grad for param in bucket.params)",
        "not nbytes",
        test="tests/core/test_frozen_kept.py::test_what_is_frozen_is_gathered_once",
        families=("freezing",),
    ),
    # -- optimizers, copies ------------------------------------------------------------------
    Fault(
        "flat_step gives all parameters of a run the state of the first",
        RUNS,
        "        start = self.offsets[i]\n",
        "        start = self.offsets[0]\n",
        test="tests/optim/test_optim_flat.py::test_bit_for_bit_the_step_on_each_parameter",
    ),
    Fault(
        "flat_step joins parameters whose counts of steps differ",
        RUNS,
        "entries.append((key, value.dtype, value.device, numbers[id(value)]))",
        "entries.append((key, value.dtype, value.device))",
        test="tests/optim/test_optim_flat.py::test_missing_gradients",
        families=("optimizers", "gradients"),
    ),
    Fault(
        "flat_step steps parameters without gradients beside others that have some",
        RUNS,
        "return not self.active and not all(missing)",
        "return False",
        test="tests/optim/test_optim_flat.py"
        "::test_what_users_do_to_gradients_between_backward_and_step_counts",
    ),
    Fault(
        "a copy of what was frozen while gathered trains",
        "api/deepcopy.py",
        "    unit.param_group.freezing.adopt()  # done to what is gathered\n",
        "",
        test="tests/core/test_programs.py::test_found_programs",
        families=("freezing", "models"),
    ),
    Fault(
        "offload_optimizer loses what a step made anew",
        "offload/paging.py",
        "                made[key] = value\n            elif",
        "                pass\n            elif",
        test="tests/optim/test_offload_optimizer.py::test_state_that_is_made_anew",
        families=("optimizers",),
    ),
    # -- registration and hooks --------------------------------------------------------------
    Fault(
        "units that stay gathered are built anew after functional_call",
        "features/functional_call.py",
        "            if unit.registration.registered != self.found[unit]:",
        "            if not unit.registration.registered:",
        test="tests/core/test_functional.py::test_units_that_stay_gathered_go_on_as_before",
        families=("weights", "memory"),
    ),
    Fault(
        "what functional_call lends is lost where a unit is planned before its own forward",
        "features/functional_call.py",
        "            put(self.lent[unit])",
        "            pass",
        test="tests/core/test_functional.py::test_evaluation_with_other_weights_right_after_a_move",
        families=("weights", "memory"),
    ),
    Fault(
        "parameters that users replaced are taken away without a word",
        REGISTRATION,
        "        if self.check_is_due:\n            self.check()",
        "        if self.check_is_due:\n            self.check_is_due = False",
        test="tests/core/test_merging.py"
        "::test_a_parameter_that_is_replaced_before_a_layer_raises_is_found_afterwards",
        families=("weights",),
    ),
    Fault(
        "mixed precision does not cast keyword arguments",
        HOOKS,
        "            args, kwargs = map_tensors(self._cast_input, (args, kwargs))\n"
        "        return args, kwargs\n\n    def post_forward",
        "            args = map_tensors(self._cast_input, args)\n"
        "        return args, kwargs\n\n    def post_forward",
        test="tests/core/test_mixed_precision.py::test_which_inputs_are_cast",
        families=("graphs",),
    ),
    Fault(
        "outputs keep the dtype of computation",
        HOOKS,
        "        return output if self._cast_output is None else "
        "map_tensors(self._cast_output, output)\n\n    def _to_device",
        "        return output\n\n    def _to_device",
        test="tests/core/test_mixed_precision.py::test_output_dtype_of_the_root",
        families=("graphs",),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose effect or file has this text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", type=int, default=60, help="at most, of each kind")
    parser.add_argument("--minutes", type=float, default=6, help="at most, for those of each kind")
    parser.add_argument("--stop-after", type=float, default=1e9, help="minutes; nothing new then")
    parser.add_argument("--results", type=Path, help="a JSON file: what it has is not run again")
    parser.add_argument("--table", type=Path, help="write all of --results there, as Markdown")
    options = parser.parse_args()
    until_s = time.monotonic() + 60 * options.stop_after
    results: dict[str, Any] = {}
    if options.results is not None and options.results.exists():
        results = json.loads(options.results.read_text())
    for fault in FAULTS:
        if options.only not in fault.effect and options.only not in fault.file:
            continue
        result = results.setdefault(fault.effect, {})
        for kind in ("test", "all", "families"):
            if kind in result or time.monotonic() > until_s:
                continue
            if kind == "families" and (found_by(result.get("all")) or not fault.families):
                continue
            if kind == "test":
                result[kind] = by_test(fault)
            else:
                families = fault.families if kind == "families" else ()
                limits = (options.programs, options.minutes, options.seed)
                result[kind] = by_programs(fault, families, *limits)
            print(f"{fault.file}: {fault.effect}: {kind}: {result[kind]}", flush=True)
            if options.results is not None:
                options.results.write_text(json.dumps(results, indent=1) + "\n")
    if options.table is not None:
        options.table.write_text(table(results))


def found_by(result: dict[str, Any] | None) -> bool:
    return bool(result) and result["found"]


def table(results: dict[str, Any]) -> str:
    """The results in the order of `FAULTS`, as a page."""
    known = [(fault, results[fault.effect]) for fault in FAULTS if results.get(fault.effect)]
    of_all, of_families, by_tests = (
        sum(found_by(result.get(kind)) for _, result in known)
        for kind in ("all", "families", "test")
    )
    lines = [
        "# Planted faults",
        "",
        "Written by `python -m planted_faults --table`. Each fault is one wrong line in a copy of",
        "the package. Random programs run against it until one fails: of all kinds and, if none of",
        "these does, of the families of operations that the fault is about. The fixed test that is",
        "named fails with it.",
        "",
        f"Of {len(known)} faults, {by_tests} fail their fixed test; {of_all} are found by programs",
        f"of all kinds, and {of_families} more by programs of their families.",
        "",
        "| file | effect | program of all kinds | of its families | fixed test |",
        "|---|---|---|---|---|",
    ]
    for fault, result in known:
        told = [told_by(result.get("all")), told_by(result.get("families"))]
        if found_by(result.get("families")):
            told[1] += f" ({', '.join(fault.families)})"
        test = f"`{fault.test}`" if found_by(result.get("test")) else "none"
        lines.append(f"| `{fault.file}` | {fault.effect} | {told[0]} | {told[1]} | {test} |")
    return "\n".join(lines) + "\n"


def told_by(result: dict[str, Any] | None) -> str:
    if result is None:
        return ""
    return f"{result['programs']}" if result["found"] else f"none of {result['programs']}"


def by_test(fault: Fault) -> dict[str, Any]:
    """Whether the fixed test fails."""
    if not fault.test:
        return {"found": False}
    settings = ["-c", f"{REPOSITORY}/pyproject.toml", "-p", "no:cacheprovider"]
    command = ["-m", "pytest", "-q", "-x", *settings, f"{REPOSITORY}/{fault.test}"]
    ran = run_with(fault, command)
    if ran.returncode not in (0, 1):  # 1: tests failed
        raise RuntimeError(f"The test did not run:\n{ran.stdout}\n{ran.stderr}")
    return {"found": ran.returncode == 1}


def by_programs(
    fault: Fault, families: Sequence[str], programs: int, minutes: float, seed: int = 0
) -> dict[str, Any]:
    """How many programs it takes until one fails, and its error."""
    command = ["-m", "program_runs", "--seeds", str(seed), "--first-failure"]
    command += ["--programs", str(programs), "--minutes", str(minutes)]
    if families:
        command += ["--families", *families]
    ran = run_with(fault, command)
    errors = re.findall(r"^(\w+(?:Error|Exception)\b.*|.*\b(?:died|hung)\b.*)$", ran.stdout, re.M)
    if found := re.search(r"^program (\d+):", ran.stdout, re.MULTILINE):
        error = errors[-1].strip()[:90] if errors else ""
        return {"found": True, "programs": int(found[1]) + 1, "error": error}
    ended = re.search(r"(\d+) programs, 0 failed", ran.stdout)
    if ran.returncode or ended is None:
        raise RuntimeError(f"The programs did not run:\n{ran.stdout}\n{ran.stderr}")
    return {"found": False, "programs": int(ended[1])}


def run_with(fault: Fault, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run Python with the fault in fsdp2."""
    with tempfile.TemporaryDirectory() as folder:
        fault.planted_in(Path(folder))
        paths = (folder, REPOSITORY / "tests/support", REPOSITORY)
        return subprocess.run(
            [sys.executable, *command],
            cwd=folder,  # which comes before PYTHONPATH
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
            capture_output=True,
            text=True,
        )


if __name__ == "__main__":
    main()
