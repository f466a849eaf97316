"""The command ``fsdp2``.

Each group of commands has a module (`cli_ckpt`, `cli_explain`, `cli_plan`) with a function that
adds its parsers. A command is one function, which gets the parsed arguments and returns the exit
code; what it needs is imported when it runs.

Exit codes: 0; 1 for a negative answer (corrupt, different); 2 for wrong usage or input that
cannot be read; 130 after Ctrl-C. Errors are one line on stderr.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import torch

from .cli_ckpt import add_ckpt
from .cli_explain import add_explain
from .cli_plan import add_estimate, add_plan
from .terminal import BROKEN_PIPE, INTERRUPTED, fail
from .versions import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    try:
        args = _make_parser().parse_args(argv)
        code = _run(args)
        sys.stdout.flush()
        return code
    except _UsageError as error:
        return fail(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # What is left in the buffer goes nowhere, instead of to a traceback at the exit.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _run(args: argparse.Namespace) -> int:
    """Run the command; what is wrong with its input is one line."""
    from .checkpoint import CheckpointError

    try:
        return args.run(args)
    except BrokenPipeError:
        raise
    except (CheckpointError, OSError) as error:
        return fail(error)


class _UsageError(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message} (see {self.prog} --help)")


def _versions() -> str:
    python = platform.python_version()
    return f"fsdp2 {__version__} (torch {torch.__version__}, Python {python})"


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fsdp2", description="Tools of the fsdp2 package.")
    parser.add_argument("--version", action="version", version=_versions())
    groups = parser.add_subparsers(metavar="COMMAND", required=True)
    add_ckpt(groups)
    add_explain(groups)
    add_estimate(groups)
    add_plan(groups)
    return parser
