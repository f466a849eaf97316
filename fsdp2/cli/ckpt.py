"""``fsdp2 ckpt``: arguments of the commands on checkpoints, and what they print."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..render.text import (
    NEGATIVE,
    bytes_of,
    fail,
    plural,
    print_json,
    progress,
    show_bytes,
    shown,
    table,
)

if TYPE_CHECKING:
    from ..checkpoint.tools.compare import Difference
    from ..checkpoint.tools.export import Exported
    from ..checkpoint.tools.inspect import Summary, Tally


_STEP: dict[str, Any] = {
    "type": int,
    "metavar": "N",
    "help": "step in a Checkpointer's folder (default: the latest)",
}
_PATH: dict[str, Any] = {
    "metavar": "PATH",
    "help": "checkpoint folder (of fsdp2 or Hugging Face), index file, safetensors file, or "
    "folder of a Checkpointer",
}


def add_ckpt(groups: Any) -> None:
    """Add the group ``ckpt`` with its commands."""
    about = "inspect, verify, export and compare checkpoints"
    group = groups.add_parser("ckpt", help=about, description=f"Tools that {about}.")
    commands = group.add_subparsers(metavar="COMMAND", required=True)
    for name, run, add_arguments, about in (
        ("inspect", ckpt_inspect, _add_inspect, "show the contents of a checkpoint"),
        ("verify", ckpt_verify, _add_verify, "compare every byte with its checksum"),
        (
            "export",
            ckpt_export,
            _add_export,
            "write whole tensors to ordinary safetensors files",
        ),
        ("diff", ckpt_diff, _add_diff, "compare two checkpoints: names, dtypes, shapes, values"),
    ):
        description = f"{about[0].upper()}{about[1:]}"
        parser = commands.add_parser(name, help=about, description=description)
        parser.set_defaults(run=run)
        add_arguments(parser)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", **_PATH)
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--step", **_STEP)
    _add_json(parser)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", **_PATH)
    parser.add_argument("--step", **_STEP)
    _add_json(parser)
    _add_quiet(parser)


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", **_PATH)
    parser.add_argument(
        "out", metavar="OUT", help="folder to create, or one file if it ends in .safetensors"
    )
    parser.add_argument("--step", **_STEP)
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="cast the model's floating-point tensors"
    )
    parser.add_argument(
        "--max-file-size",
        type=parse_bytes,
        default=parse_bytes("5GB"),
        metavar="SIZE",
        help="maximum size of a file: 5GB (the default), 500MiB, ...",
    )
    parser.add_argument("--single", action="store_true", help="write one file, however large")
    parser.add_argument("--no-verify", action="store_true", help="do not verify checksums")
    parser.add_argument(
        "--with-optimizer",
        action="store_true",
        help="also export the optimizer's tensors, in separate files",
    )
    _add_quiet(parser)


def _add_diff(parser: argparse.ArgumentParser) -> None:
    for name in ("a", "b"):
        parser.add_argument(name, **{**_PATH, "metavar": name.upper()})
    for name in ("--atol", "--rtol"):
        parser.add_argument(
            name, type=_tolerance, default=0.0, metavar="X", help="tolerate atol + rtol * |b|"
        )
    _add_json(parser)
    _add_quiet(parser)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def parse_bytes(text: str) -> int:
    """``5GB``, ``1.5 MiB`` or a number, as bytes.

    Raises:
        argparse.ArgumentTypeError: for anything else, and for less than one byte.
    """
    try:
        return bytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError
    return value


# -- fsdp2 ckpt inspect -------------------------------------------------------------------------


def ckpt_inspect(args: argparse.Namespace) -> int:
    """Show the contents of a checkpoint; reads only headers and manifests."""
    from ..checkpoint.tools.inspect import describe, entries, find_checkpoint, open_checkpoint

    path, steps = find_checkpoint(args.path, args.step)
    with open_checkpoint(path) as source:
        summary = describe(source, steps)
        tensors = entries(source) if args.tensors else []
    summary.path = str(path)
    if args.json:
        result = asdict(summary)
        if args.tensors:
            result["tensors"] = [asdict(entry) for entry in tensors]
        print_json(result)
        return 0
    _print_summary(summary)
    if tensors:
        rows = [("tensor", "dtype", "shape", "bytes", "file")]
        for e in tensors:
            more = f" +{len(e.files) - 1}" if len(e.files) > 1 else ""
            size = show_bytes(e.nbytes)
            rows.append((e.name, e.dtype, str(list(e.shape)), size, e.files[0] + more))
        print("\nTensors")
        print(table(rows, right="3"))
    return 0


def _print_summary(summary: Summary) -> None:
    facts = [("Checkpoint", summary.path)]
    if summary.steps:
        shown_steps = [str(step) for step in summary.steps[-12:]]
        more = ["..."] if len(summary.steps) > 12 else []
        facts.append(("Steps", " ".join(more + shown_steps)))
    if summary.step is not None:
        facts.append(("Step", str(summary.step)))
    facts += [
        ("Bytes", f"{show_bytes(summary.total_bytes)} ({summary.total_bytes:,})"),
        ("Model", _show_tally(summary.model)),
        ("Optimizer", _show_optimizer(summary.optimizer)),
    ]
    if summary.format == "fsdp2":
        num_ranks = len(summary.ranks)
        layouts = {
            "shared": "final files, written by all ranks",
            "per-rank": "files of shards, of single ranks or several",
            "mixed": "some tensors in final files, some in files of shards",
        }
        layout = summary.layout or ""
        facts.append(("Layout", f"{layout}: {layouts[layout]}; {plural(num_ranks, 'rank')}"))
        facts.append(("Written", _show_writers(summary.writers)))
        facts.append(("Verifiable", "yes, with a checksum for every MiB"))
    else:
        written = ", ".join(f"{key}={value}" for key, value in sorted(summary.metadata.items()))
        facts.append(("Written", f"by another library{f' ({written})' if written else ''}"))
        facts.append(("Verifiable", "no checksums: only the structure"))
    print(table(facts, indent=0))
    for title, tallies in (("Dtypes", summary.dtypes), ("Optimizer state", summary.optimizer)):
        if tallies:
            rows = [
                (
                    name,
                    plural(t.num_tensors, "tensor"),
                    f"{t.num_elements:,}",
                    show_bytes(t.nbytes),
                )
                for name, t in tallies.items()
            ]
            print(f"\n{title}")
            print(table(rows, right="123"))
    print("\nFiles")
    print(table([(f, show_bytes(size)) for f, size in summary.files.items()], right="1"))
    if summary.aliases:
        print("\nTied")
        print(table([(alias, "is", first) for alias, first in summary.aliases.items()]))


def _show_tally(tally: Tally) -> str:
    what = f"{tally.num_elements:,} parameters in {plural(tally.num_tensors, 'tensor')}"
    return f"{what}, {show_bytes(tally.nbytes)}"


def _show_optimizer(states: dict[str, Tally]) -> str:
    if not states:
        return "no state"
    num = sum(t.num_tensors for t in states.values())
    size = show_bytes(sum(t.nbytes for t in states.values()))
    return f"{', '.join(states)}: {plural(num, 'tensor')}, {size}"


def _show_writers(writers: dict[str, list[str]]) -> str:
    versions = [f"{key} {'/'.join(writers[key])}" for key in ("fsdp2", "torch") if key in writers]
    hosts, times = writers.get("host", []), writers.get("time", [])
    where = [f"on {hosts[0]}" if len(hosts) == 1 else f"on {len(hosts)} hosts"] if hosts else []
    when = [f"at {times[-1]}"] if times else []
    return " ".join([f"by {', '.join(versions)}", *where, *when])


# -- fsdp2 ckpt verify --------------------------------------------------------------------------


def ckpt_verify(args: argparse.Namespace) -> int:
    """Compare every byte with its checksum; returns 1 if the checkpoint is corrupt."""
    from ..checkpoint import CorruptCheckpoint
    from ..checkpoint.tools.inspect import bytes_to_check, check, find_checkpoint, open_checkpoint

    path, _ = find_checkpoint(args.path, args.step)
    try:
        with (
            open_checkpoint(path) as source,
            progress(args, "verify", bytes_to_check(source)) as advance,
        ):
            found = check(source, advance)
    except CorruptCheckpoint as error:
        if args.json:
            print_json({"path": str(path), "ok": False, "error": str(error)})
        return fail(error, NEGATIVE)
    rate = found.nbytes / max(found.seconds, 1e-9)
    if args.json:
        print_json({"path": str(path), "ok": True, **asdict(found), "bytes_per_s": rate})
    elif not found.checksums:
        print(
            f"{shown(str(path))}: it has no checksums, so only its structure could be checked; it "
            f"is valid ({plural(found.num_tensors, 'tensor')}, {plural(found.num_files, 'file')})"
        )
    else:
        print(
            f"{shown(str(path))}: all checksums match: {plural(found.num_tensors, 'tensor')}, "
            f"{plural(found.num_files, 'file')}, {show_bytes(found.nbytes)} in "
            f"{found.seconds:.2f} s ({show_bytes(rate)}/s)"
        )
    return 0


# -- fsdp2 ckpt export --------------------------------------------------------------------------


def ckpt_export(args: argparse.Namespace) -> int:
    """Write ordinary safetensors files of whole tensors."""
    from ..checkpoint.tools.export import bytes_to_export, export
    from ..checkpoint.tools.inspect import open_checkpoint

    with open_checkpoint(args.path, args.step) as source:
        total = bytes_to_export(source, with_optimizer=args.with_optimizer)
        if args.with_optimizer and not source.optimizer:
            return fail(f"{source.path} has no optimizer state")
        with progress(args, "export", total) as advance:
            done = export(
                source,
                args.out,
                dtype=args.dtype,
                max_file_bytes=args.max_file_size,
                single=args.single,
                verify=not args.no_verify,
                with_optimizer=args.with_optimizer,
                on_bytes=advance,
            )
        checksums = source.verifiable
    _print_exported(done, args, checksums)
    return 0


def _print_exported(done: Exported, args: argparse.Namespace, checksums: bool) -> None:
    for name, num in done.not_finite.items():
        print(
            f"fsdp2: warning: {plural(num, 'value')} of '{shown(name)}' overflowed to infinity in "
            f"{args.dtype}",
            file=sys.stderr,
        )
    verified = "checksums verified" if done.verified else (
        "not verified" if checksums else "it had no checksums to compare"
    )  # fmt: skip
    size = sum(done.files.values())
    print(
        f"{shown(args.out)}: {plural(done.num_tensors, 'tensor')}, {show_bytes(size)} in "
        f"{done.seconds:.2f} s; {verified}"
    )
    print(table([(file, show_bytes(size)) for file, size in done.files.items()], right="1"))


# -- fsdp2 ckpt diff ----------------------------------------------------------------------------


def ckpt_diff(args: argparse.Namespace) -> int:
    """Compare two checkpoints; returns 1 if they differ."""
    from ..checkpoint.tools.compare import bytes_to_compare, compare
    from ..checkpoint.tools.inspect import open_checkpoint

    with (
        open_checkpoint(args.a) as a,
        open_checkpoint(args.b) as b,
        progress(args, "diff", bytes_to_compare(a, b)) as advance,
    ):
        found = compare(a, b, atol=args.atol, rtol=args.rtol, on_bytes=advance)
    if args.json:
        print_json({"equal": found.equal, **asdict(found)})
        return 0 if found.equal else NEGATIVE
    for side, names in (("A", found.only_a), ("B", found.only_b)):
        if names:
            print(f"Only in {side}")
            print(table([(name,) for name in names]))
    if found.differences:
        print("Different")
        print(table([_show_difference(d) for d in found.differences]))
    parts = [f"{plural(found.num_equal, 'tensor')} equal"]
    if found.num_close:
        parts.append(f"{found.num_close:,} within the tolerances")
    parts.append(f"{len(found.differences):,} different")
    if found.only_a or found.only_b:
        parts.append(f"{len(found.only_a) + len(found.only_b):,} only in one")
    if found.max_abs_difference:
        parts.append(f"largest difference {found.max_abs_difference:.6g}")
    if found.optimizer.startswith("only"):
        parts.append(f"optimizer state {found.optimizer}, not compared")
    print("; ".join(parts))
    return 0 if found.equal else NEGATIVE


def _show_difference(d: Difference) -> tuple[str, str, str]:
    if d.what == "shape":
        return d.name, "shape", f"{d.a} and {d.b}"
    values = f"{d.num_different:,} of {d.numel:,} values, by up to {d.max_abs_difference:.6g}"
    if d.num_nan:
        values += f", {d.num_nan:,} with NaN"
    if d.what == "dtype":
        return d.name, "dtype", f"{d.a} and {d.b}; {values if d.num_different else 'equal values'}"
    return d.name, "values", values
