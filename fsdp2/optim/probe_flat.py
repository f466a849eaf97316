"""Finds out by experiment whether an optimizer steps one vector as it steps many parameters.

A flat tensor hides where parameters begin and which shape they have. So the probes of a group are
stepped as they are and laid out as one vector, and the results compared (see `probe`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .probe import (
    CannotTry,
    Probe,
    RawStep,
    in_double,
    in_dtype,
    is_close,
    new_parameter,
    new_run,
    num_steps,
    probes_of,
    same_options,
    step_once,
)


def why_not_flat(optimizer: Optimizer, raw: RawStep, closure: bool) -> str | None:
    """Why stepping parameters laid out as one vector differs from stepping them; None if not.

    Raises:
        CannotTry: if a step raised.
    """
    probes = probes_of(optimizer)

    def compare(dtype: torch.dtype | None) -> str | None:
        return _compare_flat(optimizer, raw, [in_dtype(p, dtype) for p in probes], closure)

    return in_double(compare, probes, lambda: None)


def _compare_flat(
    optimizer: Optimizer, raw: RawStep, probes: Sequence[Probe], closure: bool
) -> str | None:
    """Compare the probes of each group with one vector that has all their elements."""
    together: dict[tuple[Any, ...], list[int]] = {}
    for i, probe in enumerate(probes):
        together.setdefault((probe.group, probe.dtype, probe.device), []).append(i)
    # State may differ from parameter to parameter: all begin with the state of one.
    alike = list(probes)
    for members in together.values():
        real = max((probes[i].real for i in members), key=lambda p: p.ndim)
        for i in members:
            alike[i] = replace(probes[i], real=real)
    wholes = [new_parameter(p.value()) for p in probes]
    flats = [new_parameter(_laid_out([wholes[i] for i in m])) for m in together.values()]
    firsts = [alike[members[0]] for members in together.values()]
    runs = [new_run(optimizer, alike, wholes), new_run(optimizer, firsts, flats)]
    for step in range(num_steps(optimizer)):
        before = [p.detach().clone() for p in wholes]
        for p, probe in zip(wholes, probes, strict=True):
            p.grad = probe.grad(step)
        for flat, members in zip(flats, together.values(), strict=True):
            flat.grad = _laid_out([probes[i].grad(step) for i in members])
        step_once(optimizer, raw, runs[0], closure)
        try:
            step_once(optimizer, raw, runs[1], closure)
        except CannotTry as error:
            return f"cannot step on parameters that are laid out as one vector ({error})"
        for flat, members in zip(flats, together.values(), strict=True):
            expected = _laid_out([wholes[i].detach() for i in members])
            old = _laid_out([before[i] for i in members])
            if not is_close(flat, expected, old):
                return "steps a parameter differently when it has another number of dims"
        if not same_options(runs[0], runs[1]):
            return "writes group values that depend on how many parameters there are"
    return None


def _laid_out(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])
