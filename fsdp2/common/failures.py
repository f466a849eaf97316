"""Errors of communication, raised again with context.

A rank that waits for others gets the backend's error after its timeout: which socket, how many
milliseconds. The error lacks what this rank waited for, and that the cause is on another rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch.distributed as dist

# What to do about ranks that differ; one clause.
ADVICE = (
    "Another rank failed or did something else: see its output, or run the step inside of "
    "`with fsdp2.watch_ranks(model):`"
)

# gloo raises plain RuntimeErrors: most name a file of its source, those after a timeout say this.
_FRAMES = "Exception raised from "
_OF_GLOO = ("gloo", "Application timeout caused pair closure")


def is_of_communication(error: BaseException) -> bool:
    """Whether a backend raised it, for example for a lost connection or a timeout."""
    text = str(error)
    return isinstance(error, dist.DistError) or any(part in text for part in _OF_GLOO)


def lost_what(error: BaseException) -> str | None:
    """What could not be communicated, if this caused the error; "" if unknown."""
    seen: BaseException | None = error
    found = None
    for _ in range(20):  # programs can make chains that are rings
        if seen is None:
            break
        if is_of_communication(seen):
            found = str(getattr(seen, "_fsdp2_told", "")) or found or ""
        seen = seen.__cause__ or seen.__context__
    return found


def reraise(error: RuntimeError, what: str, group: Any) -> NoReturn:
    """Raise ``error`` again; if it comes from communication, with context around it.

    Args:
        what: what was communicated: "the all-gather of unit 'layers.1' in forward".
        group: the group whose ranks communicated, or these ranks as a tuple; None: unknown.
    """
    if not is_of_communication(error) or hasattr(error, "_fsdp2_told"):
        raise error
    _drop_frames(error)
    text = f"Rank {dist.get_rank()}: {what} failed{_others(group)}: {error}\n{ADVICE}"
    try:
        told = type(error)(text)
    except TypeError:
        told = RuntimeError(text)
    vars(told)["_fsdp2_told"] = what
    raise told from error


def _drop_frames(error: BaseException) -> None:
    """Remove C++ frames from the message, which would hide the rest.

    This changes ``error`` itself: Python shows it as the cause, above the new one.
    ``TORCH_SHOW_CPP_STACKTRACES=1`` keeps the frames, as in torch.
    """
    if os.environ.get("TORCH_SHOW_CPP_STACKTRACES", "0") == "0":
        text, frames, _ = str(error).partition(_FRAMES)
        if frames:
            error.args = (text.rstrip(), *error.args[1:])


def _others(group: Any) -> str:
    if group is None:
        return ""
    try:
        ranks = group if isinstance(group, tuple) else dist.get_process_group_ranks(group)
    except (KeyError, RuntimeError, TypeError, ValueError):  # a group that torch has not registered
        return ""
    me = dist.get_rank()
    others = [str(rank) for rank in ranks if rank != me]
    if not others:
        return ""
    more = f" and {len(others) - 8} more" if len(others) > 8 else ""
    word = "rank" if len(others) == 1 else "ranks"
    return f", waiting for {word} {', '.join(others[:8])}{more}"


@contextmanager
def explained(what: str, group: Any) -> Iterator[None]:
    """Context that applies `reraise` to errors of communication inside."""
    try:
        yield
    except RuntimeError as error:
        reraise(error, what, group)


@contextmanager
def says_how_to_start() -> Iterator[None]:
    """Context for creating the default process group from the environment that torchrun sets."""
    try:
        yield
    except ValueError as error:
        if "environment variable" not in str(error):
            raise
        raise ValueError(
            f"{error}. Start the program by torchrun (torchrun --nproc-per-node=2 train.py; 1 for "
            "one process), or call torch.distributed.init_process_group() with its arguments first"
        ) from None


def accumulation_lost(names: Sequence[str]) -> RuntimeError:
    """The error after a failed backward that had already added to earlier gradients.

    Args:
        names: the units that held them.
    """
    shown = ", ".join(f"'{name}'" for name in names[:5]) + (", ..." if len(names) > 5 else "")
    return RuntimeError(
        "A backward raised in the middle of an accumulation (no_sync, "
        "set_requires_gradient_sync(False), set_requires_all_reduce(False), "
        "set_is_last_backward(False), or no zero_grad() since an earlier backward). The gradients "
        "that "
        f"earlier micro-batches had left in the units {shown} cannot be told from what it had "
        "added to them, and are dropped. Call zero_grad() and run the micro-batches of this "
        "iteration again from the first one. To skip an iteration whose backward raised, call "
        "reset_iter_state() where you catch the exception: it drops all gradients"
    )


def backward_not_over() -> RuntimeError:
    """The error if a gradient arrives after a backward that raised, and before a reset."""
    return RuntimeError(
        "A gradient arrived through parameters that were gathered, by unshard() or in a forward, "
        "before another backward of this model raised: nothing would reduce it. Where you catch an "
        "exception of backward, call unshard() again (or reset_iter_state(), which also drops all "
        "gradients), and compute anew with what is gathered then"
    )


def parameters_are_gone(name: str) -> RuntimeError:
    """The error if backward reaches a forward of unit ``name`` that used former parameters."""
    return RuntimeError(
        f"Backward reached a forward of unit '{name}', whose parameters were moved, cast or "
        "replaced since (model.to(), load_state_dict(assign=True), a new nn.Parameter): the graph "
        "of that forward reads memory that is gone. Change parameters between steps, after "
        "backward or before forward"
    )
