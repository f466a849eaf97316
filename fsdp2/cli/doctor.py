"""``fsdp2 doctor``: checks the hosts of a job; runs on all ranks, before the job."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from ..render.text import NEGATIVE, fail, print_json
from .ckpt import parse_bytes


def add_doctor(groups: Any) -> None:
    about = "check the hosts, links and limits of a job (start it on all ranks)"
    parser = groups.add_parser(
        "doctor",
        help=about,
        description=(
            "Check the hosts of a job: versions, devices, clocks, addresses, limits, every link, "
            "communicators, and a folder for checkpoints. Start it on all ranks with the job's "
            "launcher: torchrun --nnodes 2 ... -m fsdp2 doctor. Rank 0 prints the problems and "
            "their remedies. The exit code is 1 if there are errors."
        ),
    )
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="also check this folder for checkpoints"
    )
    parser.add_argument(
        "--need", type=parse_bytes, default=0, metavar="SIZE", help="space that must be free: 2TB"
    )
    parser.add_argument(
        "--message",
        type=parse_bytes,
        default=16 << 20,
        metavar="SIZE",
        help="size of the messages that measure bandwidth (default: 16MiB)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to wait for a rank (default: 60)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace) -> int:
    """Check this rank's host and links; rank 0 prints the report."""
    if not args.timeout > 0:
        return fail("--timeout has to be more than 0 seconds")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is loaded
    from ..doctor.examine import examine
    from ..doctor.meeting import Meeting, NoMeetingError
    from ..doctor.report import report

    try:
        meeting = Meeting(args.timeout)
    except NoMeetingError as error:
        return fail(error, NEGATIVE)
    found = examine(meeting, folder=args.folder, need_bytes=args.need, message_bytes=args.message)
    if meeting.rank == 0:
        if args.json:
            print_json(found.to_dict())
        else:
            print(report(found), flush=True)
    return meeting.end(found.code)
