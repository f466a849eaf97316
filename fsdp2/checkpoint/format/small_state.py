"""What a rank saves next to its shards: values that are not tensors, and tensors that only it has.

The values stand at the end of the rank's manifest. The tensors are in a separate file, as were the
values in earlier releases.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CorruptCheckpoint
from .header import parse_json
from .strict import MAX_SMALL_BYTES, Check, opened_small, read_small, small_limit

MAX_MANIFEST_BYTES = 2 * MAX_SMALL_BYTES  # with the values behind it


class SmallFile(NamedTuple):
    """
    Attributes:
        sha256: of its bytes.
        num_bytes: if it is the end of the rank's manifest, how many; None: it is a file.
    """

    sha256: str
    num_bytes: int | None


def listed_small_files(files: dict[str, SmallFile]) -> dict[str, str | SmallFile]:
    """A rank's small files by name, as manifests and the index list them."""
    # A file as in earlier releases: the index of an old checkpoint is compared with its manifests.
    return {name: each.sha256 if each.num_bytes is None else each for name, each in files.items()}


def parsed_small_files(value: Any, check: Check) -> dict[str, SmallFile]:
    """The inverse of `listed_small_files`."""
    found = {}
    for name, each in check.table(value, "small_files").items():
        sha256, num = (each, None) if isinstance(each, str) else check.items(each, "a small file")
        num_bytes = None if num is None else check.number(num, "the size of a small file")
        name = check.file_name(name, "small_files")
        found[name] = SmallFile(check.text(sha256, "small_files"), num_bytes)
    return found


def read_small_file(folder: Path, marker: str, name: str, small: SmallFile) -> bytes:
    """Read a small file, and compare its checksum.

    Args:
        folder: the folder of the manifest, ``marker``.

    Raises:
        CorruptCheckpoint: if it is missing, or not what was written.
    """
    path = folder / (name if small.num_bytes is None else marker)
    try:
        if small.num_bytes is None:
            data = read_small(path, small_limit(name))
        else:
            with opened_small(path, MAX_MANIFEST_BYTES) as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - small.num_bytes))
                data = file.read()
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{path} is missing") from None
    if hashlib.sha256(data).hexdigest() != small.sha256:
        raise CorruptCheckpoint(f"{path}: the checksum is wrong: {name} is damaged")
    return data


def parse_state(data: bytes, file: str) -> dict[str, Any]:
    """The values of a rank, still encoded.

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
