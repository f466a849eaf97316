"""Checkpoints as an attacker makes them: mutations of good ones, and what every reader owes.

A mutation knows the format: it changes values of the JSON in headers, manifests, indices and small
state, and then makes the checksums right again, as an attacker would; or it changes bytes, or puts
links, pipes, folders and pickles in place of files.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from hypothesis import strategies as st
from torch import nn

from checkpoint_cases import Tied, adamw
from fsdp2.checkpoint import Checkpointer, CheckpointError, load_model
from fsdp2.checkpoint.checkpointer import peek
from fsdp2.checkpoint.format.index import PLACE, TAIL
from fsdp2.checkpoint.format.marker import read_marker, signed

STEP = "step-000001"
OWN = ".fsdp2"
INDEX = "model.safetensors.index.json"
SENTINEL = 12345.678  # in no checkpoint: what a load leaves of it, it has not filled
LIMIT_S = 60  # of one reader on one small checkpoint: far more than any needs
LIMIT_BYTES = 1 << 30  # of address space, over what the process has

NAMES = ["", ".", "..", "../secret.safetensors", "/etc/passwd", "a\0b", "a\nb", "\ud800", "x" * 300]
NUMBERS = [0, 1, -1, 2, 7, 2**31, 2**62, 2**63, 2**64, -(2**63), 10**400]
TAGGED = [
    {"$": "tensor", "dtype": "float32", "shape": [2**40], "value": ""},
    {"$": "tensor", "dtype": "load", "shape": [1], "value": "AAAA"},
    {"$": "tensor", "dtype": "float32", "shape": [-1, -1], "value": "AAAAAAAA"},
    {"$": "dtype", "value": "load"},
    {"$": "device", "value": "nonsense:1"},
    {"$": "set", "value": [[1]]},
    {"$": "deque", "value": [1], "maxlen": -1},
    {"$": "dict", "value": [[[1], 2], 3]},
    {"$": "defaultdict", "value": [], "default": "eval"},
    {"$": "float", "value": "one"},
    {"$": "complex", "value": ["1"]},
    {"$": "bytes", "value": "A"},
    {"$": "elsewhere", "value": 3},
    {"$": ["tuple"], "value": 3},
    {"$": "pickle", "value": "gASV"},
]
VALUES = [
    *NAMES, *NUMBERS, *TAGGED, None, True, 1.5, float("nan"), float("inf"), [], {}, [[]], [1, 2],
    {"a": 1}, "F32", "I64", "F33", "9" * 5000, "00000000", [2**40, 2**40], [10**300] * 50,
    [0, 2**62, 2**62],
]  # fmt: skip


class Draw:
    """Chooses, as hypothesis does: so that it can make a failing example smaller."""

    def __init__(self, data: Any) -> None:
        self._draw = data.draw

    def number(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def choice(self, values: Sequence[Any]) -> Any:
        return values[self.number(0, len(values) - 1)]


class Seeded(Draw):
    """The same choices each time."""

    def __init__(self, seed: int) -> None:
        self._generator = random.Random(seed)

    def number(self, low: int, high: int) -> int:
        return self._generator.randint(low, high)


# -- changes of JSON ----------------------------------------------------------------------------


def nodes(value: Any, into: int = 400) -> list[tuple[Any, Any]]:
    """Containers with the keys of what is in them: what a change may replace."""
    found: list[tuple[Any, Any]] = []
    left = [value]
    while left and len(found) < into:
        node = left.pop(0)
        keys = list(node) if isinstance(node, dict) else range(len(node))
        for key in keys:
            found.append((node, key))
            if isinstance(node[key], dict | list):
                left.append(node[key])
    return found


def change_json(draw: Draw, value: Any) -> Any:
    """``value`` with one node replaced, moved, doubled or removed; changed in place."""
    places = nodes(value)
    if not places or draw.number(0, 40) == 0:
        return draw.choice(VALUES)
    node, key = places[draw.number(0, len(places) - 1)]
    how = draw.choice(["value", "value", "remove", "other", "rename", "wrap", "add"])
    if how == "value":
        node[key] = draw.choice(VALUES)
    elif how == "remove":
        del node[key]
    elif how == "other":  # of the same kind, most likely, but not what belongs here
        other, other_key = places[draw.number(0, len(places) - 1)]
        node[key] = json.loads(json.dumps(other[other_key]))
    elif how == "rename" and isinstance(node, dict):
        node[draw.choice(NAMES + [str(k) for k in node])] = node.pop(key)
    elif how == "add":
        if isinstance(node, list):
            node.append(node[key])
        else:
            node[draw.choice([*NAMES, "more"])] = node[key]
    elif isinstance(node[key], int) and not isinstance(node[key], bool):
        node[key] += draw.choice([1, -1, 4, 2**32])
    else:
        node[key] = [node[key]]
    return value


def text_of(draw: Draw, value: Any) -> bytes:
    """As JSON, now and then as no good JSON."""
    how = draw.number(0, 60)
    text = json.dumps(value, separators=(",", ":"))
    if how == 0:
        return text.encode()[: draw.number(0, len(text))]
    if how == 1:
        return b"[" * 1_000_000
    if how == 2:
        return (text[:-1] + "," + text[1:]).encode()  # every key twice
    if how == 3:
        return b'{"a":' * 200_000 + b"1" + b"}" * 200_000
    if how == 4:
        return text.encode("utf-16")
    if how == 5:
        return b""
    return text.encode()


# -- changes of files ---------------------------------------------------------------------------


def split_header(data: bytes) -> tuple[bytes, bytes]:
    """The JSON of a safetensors file, and the data."""
    (length,) = struct.unpack("<Q", data[:8])
    return data[8 : 8 + length], data[8 + length :]


def framed(header: bytes, data: bytes) -> bytes:
    padded = header.ljust(-(-(len(header) + 8) // 4096) * 4096 - 8)
    return struct.pack("<Q", len(padded)) + padded + data


def change_header(draw: Draw, path: Path) -> bytes:
    """Change the header of a file; returns its JSON."""
    header, data = split_header(path.read_bytes())
    text = text_of(draw, change_json(draw, json.loads(header)))
    path.write_bytes(framed(text, data))
    return text


def change_bytes(draw: Draw, path: Path) -> None:
    """Flip, cut, insert or zero some."""
    data = bytearray(path.read_bytes())
    where = draw.number(0, max(0, len(data) - 1))
    how = draw.choice(["flip", "cut", "insert", "zero", "length"])
    if how == "flip" and data:
        data[where] ^= 1 << draw.number(0, 7)
    elif how == "cut":
        del data[where : where + draw.choice([1, 8, 4096, 10**9])]
    elif how == "insert":
        data[where:where] = draw.choice([b"\0", b'"', b"[", b"9" * 5000, bytes(4096)])
    elif how == "zero":
        end = min(len(data), where + 64)
        data[where:end] = bytes(end - where)
    else:
        data[:8] = struct.pack("<Q", draw.choice([0, 1, 99_999_999, 2**63, 2**64 - 1]))
    path.write_bytes(data)


def replace_file(draw: Draw, path: Path, outside: Path) -> None:
    """Something else under the name of a file."""
    how = draw(
        st.sampled_from(
            ["link", "loop", "dangling", "pipe", "folder", "device", "missing", "zip", "pickle",
             "sparse", "empty", "socket"]
        )
    )  # fmt: skip
    data = path.read_bytes()
    path.unlink()
    if how == "link":
        (outside / "secret").write_bytes(data)
        path.symlink_to(outside / "secret")
    elif how == "loop":
        path.symlink_to(path.name)
    elif how == "dangling":
        path.symlink_to(outside / "nothing")
    elif how == "device":
        path.symlink_to("/dev/zero")
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "socket":
        import socket

        with socket.socket(socket.AF_UNIX) as sock, contextlib.chdir(path.parent):
            sock.bind(path.name)
    elif how == "folder":
        path.mkdir()
    elif how == "zip":
        path.write_bytes(b"PK\x03\x04" + data)
    elif how == "pickle":
        path.write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR." + bytes(64))
    elif how == "sparse":
        path.write_bytes(data)
        os.truncate(path, 1 << 42)
    elif how == "empty":
        path.write_bytes(b"")


# -- checkpoints of this package ----------------------------------------------------------------


def sign(manifest: Path, line: bytes) -> None:
    """Write a manifest with a checksum that is right, which is read where there is no index."""
    (manifest.parent / "index.fsdp2").unlink(missing_ok=True)
    manifest.write_bytes(signed(line, numbers_of(manifest)) + values_of(manifest))


def numbers_of(manifest: Path) -> bytes:
    """What stands behind its lines."""
    return read_marker(manifest).split(b"\n", 2)[2]


def values_of(manifest: Path) -> bytes:
    """What stands behind its numbers: values that are not tensors."""
    return manifest.read_bytes()[len(read_marker(manifest)) :]


def set_values(manifest: Path, values: bytes) -> None:
    """Write others; no checksum is right then (`seal`)."""
    manifest.write_bytes(read_marker(manifest) + values)


def manifests_of(step: Path) -> list[Path]:
    return sorted((step / OWN).glob("rank-*.json"))


def content_of(manifest: Path) -> dict[str, Any]:
    return json.loads(manifest.read_bytes().partition(b"\n")[0])


def seal(step: Path) -> None:
    """Make the checksums of small files right again."""
    for manifest in manifests_of(step):
        content = content_of(manifest)
        for name, listed in content["small_files"].items():
            is_file = isinstance(listed, str)
            data = (step / OWN / name).read_bytes() if is_file else values_of(manifest)
            sha256 = hashlib.sha256(data).hexdigest()
            content["small_files"][name] = sha256 if is_file else [sha256, len(data)]
        sign(manifest, json.dumps(content, separators=(",", ":")).encode())


def change_index(draw: Draw, path: Path) -> None:
    """Change the contents of an index, a record or entries of a cut; all checksums are right."""
    data = path.read_bytes()
    magic, version, at, num, _ = TAIL.unpack(data[-TAIL.size :])
    body, contents = bytearray(data[:at]), json.loads(data[at : at + num])
    kind = draw.choice(["contents", "contents", "record", "entries"])
    text = None
    if kind == "contents":
        text = text_of(draw, change_json(draw, contents))
    elif kind == "record":
        place = contents["places"] + PLACE.size * draw.number(0, contents["ranks"][-1][1])
        start, size, _ = PLACE.unpack(body[place : place + PLACE.size])
        line, _, sums = bytes(body[start : start + size]).partition(b"\n")
        record = text_of(draw, change_json(draw, json.loads(line))) + b"\n" + sums
        PLACE.pack_into(body, place, len(body), len(record), crc32(record))
        body += record
    else:
        cut = draw.choice(contents["partitions"])
        ndim = len(contents["tensors"][cut["tensors"][0]][3])
        stop = cut["at"] + cut["num"] * (8 + 16 * ndim)
        where = draw.number(cut["at"], stop - 1)
        body[where] = draw.choice([0, 1, 2, 19, 128, 255])
        cut["crcs"] = [crc32(bytes(body[cut["at"] : stop]))]
    text = text or json.dumps(contents).encode()
    path.write_bytes(body + text + TAIL.pack(magic, version, len(body), len(text), crc32(text)))


def change_own(draw: Draw, step: Path) -> None:
    """A change with right checksums, of a checkpoint of this package."""
    if (index := step / OWN / "index.fsdp2").is_file() and draw.number(0, 1):
        change_index(draw, index)
        return
    kind = draw.choice(["manifest", "manifest", "state", "own", "header", "all"])
    manifests = manifests_of(step)
    manifest = manifests[draw.number(0, len(manifests) - 1)]
    if kind == "state":
        state = sorted((step / OWN).glob("state-*"))[0]
        state.write_bytes(text_of(draw, change_json(draw, json.loads(state.read_bytes()))))
        seal(step)
    elif kind == "own" and (own := sorted((step / OWN).glob("own-*"))):
        change_header(draw, own[0])
        seal(step)
    elif kind == "header":
        files = sorted(step.glob("*.safetensors"))
        path = files[draw.number(0, len(files) - 1)]
        text = change_header(draw, path).decode(errors="replace")
        for each in manifests:
            content = content_of(each)
            for files_ in content["sets"]:
                if path.name in files_["files"]:
                    data = path.read_bytes()
                    header = data[: 8 + int.from_bytes(data[:8], "little")]
                    digest = hashlib.sha256(header).hexdigest()
                    files_["files"][path.name] = [len(data), len(header), digest]
                if path.name in files_["headers"]:
                    files_["headers"][path.name] = text
            sign(each, json.dumps(content, separators=(",", ":")).encode())
    elif kind == "all":  # the same change in every manifest, so that they still agree
        seed = draw.number(0, 2**32)
        for each in manifests:
            chosen = Seeded(seed)
            sign(each, text_of(chosen, change_json(chosen, content_of(each))))
    else:
        sign(manifest, text_of(draw, change_json(draw, content_of(manifest))))


def damage(draw: Draw, folder: Path, outside: Path) -> None:
    """One to three changes of the checkpoint in ``folder``."""
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
        if not files:
            return
        path = files[draw.number(0, len(files) - 1)]
        if path.stat().st_size > 1 << 30:
            return  # it is sparse already
        how = draw.choice(["format", "format", "format", "format", "bytes", "replace"])
        try:
            if how == "bytes":
                change_bytes(draw, path)
            elif how == "replace":
                replace_file(draw, path, outside)
            elif (folder / OWN).is_dir():
                change_own(draw, folder)
            elif path.suffix == ".json":
                path.write_bytes(text_of(draw, change_json(draw, json.loads(path.read_bytes()))))
            else:
                change_header(draw, path)
        except (ValueError, LookupError, TypeError, OSError, struct.error, AttributeError):
            return  # what an earlier change has left cannot be changed so
        except RecursionError:
            return


# -- readers ------------------------------------------------------------------------------------


class Outcome(AssertionError):
    """A reader did what none may do."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Address space and time are limited inside; memory errors are raised."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)

    def too_long(*_: object) -> None:
        raise Outcome(f"a reader took more than {LIMIT_S} s")

    handler = signal.signal(signal.SIGALRM, too_long)
    left, _ = signal.setitimer(signal.ITIMER_REAL, LIMIT_S)  # that of pytest-timeout
    resource.setrlimit(resource.RLIMIT_AS, (size + LIMIT_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, left)


opened: list[tuple[str, int]] = []
_recording = False


def _note_open(event: str, args: tuple[Any, ...]) -> None:
    if _recording and event == "open" and isinstance(args[0], str):
        opened.append((args[0], args[2] if isinstance(args[2], int) else 0))


_hooked = False


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[str, int]]]:
    """What is opened inside, and how."""
    global _recording, _hooked
    if not _hooked:  # a hook cannot be taken back
        sys.addaudithook(_note_open)
        _hooked = True
    opened.clear()
    _recording = True
    try:
        yield opened
    finally:
        _recording = False


def command(*args: object) -> int:
    """Run ``fsdp2``; what it prints has to be text that a terminal takes as text."""
    from fsdp2.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(map(str, args)))
    for text in (out.getvalue(), err.getvalue()):
        text.encode()
        if any(not c.isprintable() and c != "\n" for c in text):
            raise Outcome(f"{args} printed control characters: {text!r}")
    if (code == 2) != err.getvalue().startswith("fsdp2: error:") and code != 1:
        raise Outcome(f"{args} answered {code} and said {err.getvalue()!r}")
    return code


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Tied()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(SENTINEL)
    return model, adamw(model)


def bits(model: nn.Module) -> list[Any]:
    return [(n, t.dtype, t.reshape(-1).view(torch.uint8).tolist()) for n, t in tensors_of(model)]


def tensors_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(n, t.detach()) for n, t in (*model.named_parameters(), *model.named_buffers())]


def attempt(what: str, read: Callable[[], object], model: nn.Module | None = None) -> bool:
    """Whether it succeeds; an error has to be one of checkpoints, and to leave ``model``."""
    before = bits(model) if model is not None else []
    try:
        with bounded():
            read()
    except CheckpointError as error:
        if len(str(error)) > 20_000:
            raise Outcome(f"{what}: a message of {len(str(error))} characters") from error
        notes = getattr(error, "__notes__", [])
        if model is not None and bits(model) != before and not notes:
            raise Outcome(f"{what} failed and changed the model: {error}") from error
        return False
    except Outcome:
        raise
    except BaseException as error:
        raise Outcome(f"{what}: {type(error).__name__}: {str(error)[:300]}") from error
    return True


def read_all(folder: Path, original: Path, scratch: Path) -> dict[str, bool]:
    """Read a damaged checkpoint in all ways.

    Args:
        folder: the checkpoint; of this package, if it lies in a `Checkpointer`'s folder.
        original: the one that it was made from.
        scratch: an empty folder for what is exported.

    Returns:
        Which readers succeeded.
    """
    done: dict[str, bool] = {}
    for strict, verify in ((True, True), (False, False)):
        model, _ = model_and_optimizer()
        name = f"load_model strict={strict} verify={verify}"
        done[name] = attempt(
            name,
            lambda m=model, s=strict, v=verify: load_model(m, folder, strict=s, verify_checksums=v),
            model if verify else None,
        )
        if done[name] and strict:
            filled(name, model)
    if folder.name == STEP:
        read_training(folder, done)
    for args in (
        ("inspect", folder, "--tensors"),
        ("inspect", folder, "--json"),
        ("verify", folder, "--quiet"),
        ("diff", folder, original, "--quiet"),
        ("export", folder, scratch / "out", "--quiet", "--with-optimizer"),
        ("export", folder, scratch / "out.safetensors", "--quiet", "--no-verify", "--dtype=bf16"),
    ):
        codes: list[int] = []
        with bounded_command(args[0]):
            codes.append(command("ckpt", *args))
        done[f"{args[0]}{args[2:]}"] = codes == [0]
        if args[0] == "export" and codes != [0] and list(scratch.iterdir()):
            raise Outcome(f"{args} failed and left {list(scratch.iterdir())}")
        if args[0] == "export":
            for path in scratch.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return done


@contextlib.contextmanager
def bounded_command(what: str) -> Iterator[None]:
    try:
        with bounded():
            yield
    except Outcome:
        raise
    except BaseException as error:
        raise Outcome(f"fsdp2 ckpt {what}: {type(error).__name__}: {str(error)[:300]}") from error


def read_training(folder: Path, done: dict[str, bool]) -> None:
    """Read all that a training run needs; the generators of random numbers stay as they are."""
    state, numpy_state = random.getstate(), None
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy_state = numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            model, optimizer = model_and_optimizer()
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
            done["load"] = attempt(
                "Checkpointer.load",
                lambda: Checkpointer(folder.parent).load(
                    1, model=model, optimizer=optimizer, scheduler=scheduler
                ),
                model,
            )
            if done["load"]:
                filled("Checkpointer.load", model)
                for param, values in optimizer.state.items():
                    for value in values.values():
                        if isinstance(value, torch.Tensor) and value.ndim == param.ndim > 0:
                            value.sum().item()
        done["peek"] = attempt("peek", lambda: peek(folder.parent))
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def filled(name: str, model: nn.Module) -> None:
    """Check that nothing of what was there before is left."""
    for tensor_name, tensor in tensors_of(model):
        if tensor.is_floating_point() and bool((tensor == SENTINEL).any()):
            raise Outcome(f"{name} succeeded and did not fill '{tensor_name}'")
