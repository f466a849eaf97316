"""Opens a checkpoint: one of this package (`own`), or any other in safetensors files.

Opening reads headers and indexes only, and checks what can be checked without reading data.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...common.suggestions import did_you_mean
from ...dtensor.boxes import Box
from ..errors import CheckpointError, CheckpointNotFound, CorruptCheckpoint, some
from ..format.header import PICKLED, Header, parse_json
from ..format.manifest import FOLDER, INDEX
from ..format.strict import MAX_INDEX_BYTES, read_small
from .own import open_own
from .source import Extent, Source, Stored, unreadable

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def open_source(path: str | os.PathLike[str], *, by_manifests: bool = False) -> Source:
    """Open a checkpoint: a folder, an index file, or one safetensors file.

    Args:
        by_manifests: of a checkpoint of this package, read the manifests of all ranks, and check
            all that can be checked without reading data. By default they are read only if there is
            no index.

    Raises:
        CheckpointNotFound: if there is none.
        CorruptCheckpoint: if what is there is damaged or incomplete.
        CheckpointError: if it is a pickled file, or cannot be read by this user.
    """
    given = Path(path)
    with _readable(given):
        if not given.exists():
            raise CheckpointNotFound(_not_there(given))
        folder = given if given.is_dir() else given.parent
        source = Source(given, given=given)
        source.folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        _open(source, given, folder, by_manifests)
    return source


def _open(source: Source, given: Path, folder: Path, by_manifests: bool) -> None:
    try:
        if given.is_dir() and (given / FOLDER).is_dir():
            open_own(source, by_manifests)
        elif given.is_dir():
            _open_hub(source, given)
        elif given.name.endswith(".index.json"):
            source.path = folder
            if (folder / FOLDER).is_dir():
                open_own(source, by_manifests)
            else:
                _open_index(source, given)
        else:
            source.path = folder
            if given.suffix in PICKLE_SUFFIXES:
                raise CheckpointError(f"{given} is {PICKLED}")
            _open_single(source, given.name)
    except BaseException:
        source.__exit__()
        raise


@contextmanager
def _readable(given: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise unreadable(given, error) from error


def _not_there(given: Path) -> str:
    """What to say of a path at which nothing is, with a guess at what was meant."""
    path = Path(os.path.abspath(given))
    around = sorted(os.listdir(path.parent)) if path.parent.is_dir() else []
    meant = did_you_mean(path.name, around)
    # As on the Hub: owner/name. (A folder of that name would make it a path.)
    if not meant and HUB_ID.fullmatch(str(given)) and not path.parent.exists():
        meant = (
            f". If it is a model of the Hugging Face Hub, download it first: hf download {given} "
            "--local-dir FOLDER, and load the folder"
        )
    return f"{path} does not exist{meant}"


# -- checkpoints of others ----------------------------------------------------------------------


def _open_hub(source: Source, folder: Path) -> None:
    if (folder / INDEX).is_file():
        _open_index(source, folder / INDEX)
        return
    single = sorted(p.name for p in folder.glob("*.safetensors"))
    if "model.safetensors" in single:
        single = ["model.safetensors"]
    if len(single) > 1:
        raise CheckpointNotFound(
            f"{folder} is not a checkpoint: it has several files without {INDEX}: {some(single)}"
        )
    if not single:
        raise CheckpointNotFound(
            f"{folder} is not a checkpoint: it has no safetensors file{_what_it_is(folder)}"
        )
    _open_single(source, single[0])


def _what_it_is(folder: Path) -> str:
    """A guess at what a folder that is not a checkpoint may be; the end of a message."""
    names = sorted(path.name for path in folder.iterdir())
    steps = [n for n in names if n.startswith("step-") and (folder / n / FOLDER).is_dir()]
    if steps:
        return (
            f". It is the folder of a Checkpointer: give one of its steps ({folder / steps[-1]}), "
            "or load it with Checkpointer(...).load"
        )
    if ".metadata" in names:
        return (
            ". It is one of torch.distributed.checkpoint: load it with that, or convert it with "
            "torch.distributed.checkpoint.format_utils.dcp_to_torch_save"
        )
    pickled = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    return f", but {some(pickled)}, which is {PICKLED}" if pickled else ""


def _open_single(source: Source, name: str) -> None:
    header = source.read_header(name)
    source.metadata = header.metadata
    for tensor, info in header.tensors.items():
        extent = Extent(name, Box.whole(info.shape), header.offsets[tensor])
        source.tensors[tensor] = Stored(info, [extent])


def _open_index(source: Source, index: Path) -> None:
    try:
        text = read_small(index, MAX_INDEX_BYTES, links=True)
        items = list(parse_json(text, str(index))["weight_map"].items())
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"{index}: not an index of safetensors files: {error!r}") from error
    headers: dict[str, Header] = {}
    for tensor, file in items:
        if not isinstance(file, str):
            raise CorruptCheckpoint(f"{index}: the file of {tensor[:300]!r} is {file!r:.99}")
        if file not in headers:
            headers[file] = source.read_header(file)
        info = headers[file].tensors.get(tensor)
        if info is None:
            raise CorruptCheckpoint(f"{index}: tensor {tensor[:300]!r} is not in {file}")
        extent = Extent(file, Box.whole(info.shape), headers[file].offsets[tensor])
        source.tensors[tensor] = Stored(info, [extent])
