"""Manifests as earlier releases wrote them, made from those of today."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from fsdp2.checkpoint.format.manifest import Manifest, parse_marker_name, state_name, tables_of
from fsdp2.checkpoint.format.marker import load

FOLDER = ".fsdp2"


def as_version_1(step: Path) -> None:
    """Rewrite the manifests of a checkpoint as version 1, and remove its index."""
    paths = [path for path in sorted((step / FOLDER).iterdir()) if parse_marker_name(path.name)]
    manifests = [load(path.read_bytes(), path.name) for path in paths]
    for path, manifest in zip(paths, manifests, strict=True):
        content = content_of_version_1(step, manifest, manifests)
        state = state_name(manifest.rank)
        if (num_bytes := manifest.small_files[state].num_bytes) is not None:
            (path.parent / state).write_bytes(path.read_bytes()[-num_bytes:])
        path.write_bytes(signed_as_version_1(json.dumps(content).encode()))
    if (index := step / FOLDER / "index.fsdp2").exists():
        index.unlink()


def signed_as_version_1(line: bytes) -> bytes:
    """The bytes of a manifest: two lines of JSON."""
    digest = hashlib.sha256(line).hexdigest().encode()
    return b"".join((line, b'\n{"sha256":"', digest, b'"}\n'))


def content_of_version_1(
    step: Path, manifest: Manifest, manifests: list[Manifest]
) -> dict[str, Any]:
    """All ranks in a list, a row for each chunk, and the headers of a rank's own files as text."""
    tables = tables_of(manifests)
    chunks = [chunk for files in manifest.sets for chunk in files.chunks(tables)]
    return {
        "format": "fsdp2-checkpoint",
        "version": 1,
        "nonce": manifest.nonce,
        "name": manifest.name,
        "rank": manifest.rank,
        "ranks": list(manifest.ranks),
        "sets": [
            {
                "ranks": list(files.ranks),
                "sizes": {file: info.size for file, info in files.files.items()},
                "whole": files.whole,
                "digest": files.digest,
                "headers": files.headers
                if files.whole
                else {file: header_of(step / file) for file in files.files},
            }
            for files in manifest.sets
        ],
        "tensors": {c.tensor.name: [c.tensor.dtype, list(c.tensor.shape)] for c in chunks},
        "chunks": [
            [
                chunk.tensor.name,
                chunk.file,
                list(chunk.box.start),
                list(chunk.box.shape),
                chunk.offset,
                "".join(f"{crc:08x}" for crc in chunk.checksums),
            ]
            for chunk in chunks
        ],
        "aliases": manifest.aliases,
        "small_files": {name: small.sha256 for name, small in manifest.small_files.items()},
        "writer": manifest.writer,
    }


def header_of(path: Path) -> str:
    """The JSON of a safetensors file, without the spaces behind it."""
    with open(path, "rb") as file:
        length = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
        return os.pread(file.fileno(), length, 8).decode().rstrip()
