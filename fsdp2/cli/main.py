"""The command ``fsdp2``.

Each group of commands has a module (`ckpt`, `explain`, `plan`) with a function that adds its
parsers. A command is a function that takes the parsed arguments and returns the exit code; its
imports, above all torch, take place when it runs.

Exit codes: 0; 1 for a negative answer (corrupt, different); 2 for wrong usage or input that
cannot be read; 130 after Ctrl-C; 141 if the output pipe is closed. Errors are one line on stderr.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from typing_extensions import override

from ..common.suggestions import did_you_mean
from ..common.versions import __version__, installed_torch
from ..render.text import BROKEN_PIPE, INTERRUPTED, fail
from .ckpt import add_ckpt
from .compare import add_compare
from .cost import add_cost
from .doctor import add_doctor
from .explain import add_explain
from .measure import add_measure
from .plan import add_estimate, add_plan, add_predict


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    parser = _make_parser()
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        args = parser.parse_args(given)
        code = _run(args)
        sys.stdout.flush()
        return code
    except _UsageError as error:
        message, program = error.args
        return fail(f"{message}{_hint(message, given, parser)} (see {program} --help)")
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Discard what is left in the buffer, to avoid a traceback at exit.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _run(args: argparse.Namespace) -> int:
    """Run the command; errors in its input are printed as one line."""
    from ..checkpoint import CheckpointError

    try:
        return args.run(args)
    except BrokenPipeError:
        raise
    except (CheckpointError, OSError) as error:
        return fail(error)


class _UsageError(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    @override
    def error(self, message: str) -> NoReturn:
        raise _UsageError(message, self.prog)


def _hint(message: str, given: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """A suggestion for a word that argparse rejects."""
    commands, options = _words_of(parser)
    choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
    if choice is not None:
        known = re.findall(r"[^\s',]+", choice[2])
        if "COMMAND" in message:
            known += [name for name in commands if " " in name]
        return did_you_mean(choice[1], known)
    for word in given:
        name = word.partition("=")[0]
        if name.startswith("--") and not any(option.startswith(name) for option in options):
            hint = did_you_mean(name, options)
            return hint if name in message or not hint else f"; there is no {name}{hint}"
    return ""


def _words_of(parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Commands (such as ``ckpt inspect``) and options of a parser and its subparsers."""
    commands: list[str] = []
    options: list[str] = []
    for action in vars(parser)["_actions"]:  # argparse has no public way
        options += action.option_strings
        inside = action.choices if isinstance(action.choices, dict) else {}
        for name, inner in inside.items():
            if isinstance(inner, argparse.ArgumentParser):
                more = _words_of(inner)
                commands += [name, *(f"{name} {each}" for each in more[0])]
                options += more[1]
    return commands, options


def _versions() -> str:
    python = platform.python_version()
    return f"fsdp2 {__version__} (torch {installed_torch() or 'missing'}, Python {python})"


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fsdp2", description="Command-line tools of fsdp2.")
    parser.add_argument("--version", action="version", version=_versions())
    groups = parser.add_subparsers(metavar="COMMAND", required=True)
    add_ckpt(groups)
    add_explain(groups)
    add_estimate(groups)
    add_predict(groups)
    add_plan(groups)
    add_cost(groups)
    add_compare(groups)
    add_doctor(groups)
    add_measure(groups)
    return parser
