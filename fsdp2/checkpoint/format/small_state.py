"""The file of a rank's values that are not tensors: parsed, and every value of the right kind."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from .header import parse_json
from .strict import Check


def parse_state(data: bytes, file: str) -> dict[str, Any]:
    """What `state-....json` holds, still encoded.

    Raises:
        CorruptCheckpoint: if that is not what was written.
    """
    check = Check(file)
    values = check.table(parse_json(data, file), "it")
    for groups in check.items(values.get("optimizers", []), "optimizers"):
        for group in check.items(groups, "the groups of an optimizer"):
            _check_group(group, check)
    for name, entry in check.table(values.get("optimizer_state", {}), "optimizer_state").items():
        _check_entry(entry, f"optimizer_state[{name[:200]!r}]", check)
    check.items(values.get("schedulers", []), "schedulers")
    check.table(values.get("extra_state", {}), "extra_state")
    if "random" in values:
        check.table(values["random"], "random")
    return values


def digest_of_names(values: dict[str, Any]) -> str:
    """A digest of the names of parameters that a rank's optimizers have, and of those with state.

    Ranks with the same one need not read each other's file to know what was saved.
    """
    params = [g["params"] for groups in values.get("optimizers", []) for g in groups]
    names = [params, sorted(values.get("optimizer_state", {}))]
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


def _check_group(group: Any, check: Check) -> None:
    check.table(group, "a group")
    for name in check.items(group.get("params"), "params"):
        check.text(name, "the name of a parameter")
    options = check.table(group.get("options"), "options")
    if "params" in options:  # it would take the place of the optimizer's parameters
        raise check.bad("an option", "params")
    if group.get("optimizer") is not None:
        check.text(group["optimizer"], "the name of an optimizer")


def _check_entry(entry: Any, name: str, check: Check) -> None:
    check.table(entry, name)
    check.items(entry.get("keys"), f"keys of {name}")
    check.table(entry.get("values"), f"values of {name}")
    for layout in check.table(entry.get("layouts", {}), f"layouts of {name}").values():
        if isinstance(layout, list):
            check.numbers([dim for dim in layout if dim is not None], f"a layout of {name}")
        elif layout is not None:
            check.text(layout, f"a layout of {name}")
