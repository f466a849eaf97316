"""``fsdp2 measure``: measures hardware on all ranks of a job; writes a file for ``plan``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..render.text import fail
from .together import run_together


def add_measure(groups: Any) -> None:
    about = "measure a job's hardware for fsdp2 plan (start it on all ranks)"
    parser = groups.add_parser(
        "measure",
        aliases=["calibrate"],
        help=about,
        description=(
            "Measure matrix products, attention, norms, memory, the host, collectives by size over "
            "each dim of a mesh, and the disk, in 1 to 2 minutes. Start it on all ranks with the "
            "job's launcher: torchrun --nnodes 2 ... -m fsdp2 measure --out ours.json. Rank 0 "
            "writes the file. Pass it to fsdp2 plan --hardware ours.json."
        ),
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="a .json file")
    parser.add_argument(
        "--name", default="measured", help="name of the hardware (default: measured)"
    )
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="also measure the disk of this folder"
    )
    parser.add_argument("--quick", action="store_true", help="a few small sizes, for a trial")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.set_defaults(run=run_measure)


def run_measure(args: argparse.Namespace) -> int:
    """Measure on this rank; rank 0 writes the file."""
    if args.out.suffix != ".json":
        return fail(f"--out has to end in .json, got {args.out}")
    if "RANK" not in os.environ:
        return _measure(args)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is loaded
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cuda:nccl,cpu:gloo" if cuda else "gloo")
    code = run_together(lambda: _measure(args, dist.get_rank()))
    if code == 0:  # others may still wait in a collective of it
        dist.destroy_process_group()
    return code


def _measure(args: argparse.Namespace, rank: int = 0) -> int:
    if rank == 0:
        _check_out(args.out)  # before minutes of measuring
    if args.folder is not None and not args.folder.is_dir():
        raise OSError(f"--folder: there is no folder {args.folder}")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is loaded
    from ..planning import measure, write_hardware

    def progress(what: str) -> None:
        if rank == 0 and not args.quiet:
            print(f"measuring: {what}", file=sys.stderr, flush=True)

    made = measure(quick=args.quick, folder=args.folder, name=args.name, progress=progress)
    if rank == 0:
        write_hardware(made, args.out)
        print(f"{args.out}: fsdp2 plan --hardware {args.out}", flush=True)
    return 0


def _check_out(out: Path) -> None:
    """Raise an OSError if the file could not be written at the end."""
    folder = out.resolve().parent
    if not folder.is_dir():
        raise OSError(f"--out: there is no folder {folder}")
    if out.is_dir():
        raise OSError(f"--out: {out} is a folder")
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{out.name}."):
            pass
    except OSError as error:
        raise OSError(f"--out: {out} cannot be written: {error.strerror}") from error
