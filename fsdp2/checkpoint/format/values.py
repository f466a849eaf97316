"""Small state as JSON, without loss: values that plain JSON would change are tagged.

Numbers that JSON cannot express (nan, infinities), tuples, deques, bytes, dicts with keys that are
not strings, sets, and small tensors keep their types. Not pickle, because reading a checkpoint must
never execute code. Example::

    >>> decode(encode({"betas": (0.9, 0.95), "best": float("inf")}))
    {'betas': (0.9, 0.95), 'best': inf}
"""

from __future__ import annotations

import base64
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

TAG = "$"
# Default factories of a defaultdict that can be named; with any other it becomes a plain dict.
_FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (list, dict, set, deque, tuple, int, float, bool, str)
}

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}

Save = Callable[[torch.Tensor, str], Any]
Read = Callable[[Any], Any]


def encode(value: Any, where: str = "value", save: Save | None = None) -> Any:
    """Convert ``value`` to something that `json.dumps` writes without loss.

    Args:
        value: None, bool, int, float, complex, str, bytes, tensors, torch.dtype, torch.device,
            and lists, tuples, deques, sets and dicts of these.
        where: the name of ``value`` in an error message.
        save: called with each tensor and its place (``where`` with ``[key]`` or ``[index]`` for
            each container); stores it elsewhere and returns a JSON value by which the ``read`` of
            `decode` finds it again. None: tensors are encoded in place.

    Raises:
        TypeError: for any other type; names the place of the value.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {TAG: "float", "value": repr(float(value))}
    if isinstance(value, list):
        return [encode(v, f"{where}[{i}]", save) for i, v in enumerate(value)]
    if isinstance(value, dict):
        return _encode_dict(value, where, save)
    if isinstance(value, tuple | set | frozenset | deque):
        return _encode_sequence(value, where, save)
    if save is not None and isinstance(value, torch.Tensor):
        return {TAG: "elsewhere", "value": save(value, where)}
    return _encode_leaf(value, where)


def _encode_dict(value: dict[Any, Any], where: str, save: Save | None) -> dict[str, Any]:
    keys = [encode(k, where) for k in value]
    values = [encode(v, f"{where}[{k!r}]", save) for k, v in value.items()]
    items = [list(item) for item in zip(keys, values, strict=True)]
    # Optimizers need back the kind of dict they had; a user's `extra` comes back as a plain dict.
    if save is not None and isinstance(value, OrderedDict):
        return {TAG: "ordered dict", "value": items}
    if save is not None and isinstance(value, defaultdict):
        for name, factory in _FACTORIES.items():
            if value.default_factory is factory:
                return {TAG: "defaultdict", "value": items, "default": name}
    if TAG not in value and all(isinstance(key, str) for key in value):
        return dict(items)
    return {TAG: "dict", "value": items}


def _encode_sequence(value: Any, where: str, save: Save | None) -> dict[str, Any]:
    kind = next(k for k in (tuple, set, frozenset, deque) if isinstance(value, k)).__name__
    unordered = isinstance(value, set | frozenset)
    if save is not None and unordered and any(isinstance(v, torch.Tensor) for v in value):
        raise TypeError(f"{where} is a {kind} of tensors, which has no order: use a list")
    content = [encode(v, f"{where}[{i}]", save) for i, v in enumerate(value)]
    if isinstance(value, deque):
        return {TAG: kind, "value": content, "maxlen": value.maxlen}
    return {TAG: kind, "value": content}


def _encode_leaf(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, complex):
        return {TAG: "complex", "value": [repr(value.real), repr(value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {TAG: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype | torch.device):
        return {TAG: type(value).__name__, "value": str(value).removeprefix("torch.")}
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        data = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        raw = bytes(data.reshape(-1).view(torch.uint8).tolist()) if data.numel() else b""
        return {
            TAG: "tensor",
            "dtype": str(data.dtype).removeprefix("torch."),
            "shape": list(data.shape),
            "value": base64.b64encode(raw).decode(),
        }
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return encode(value.item(), where)
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be kept "
        "as JSON. Save numbers, strings, bytes, tensors, and lists and dicts of them (nothing is "
        "pickled)"
    )


def decode(value: Any, read: Read | None = None) -> Any:
    """The inverse of `encode`.

    Args:
        read: called with what `encode`'s ``save`` returned; returns the tensor.

    Returns:
        The value; tensors that were encoded in place are on the CPU.

    Raises:
        ValueError: for an unknown tag.
    """
    if isinstance(value, list):
        return [decode(v, read) for v in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: decode(v, read) for key, v in value.items()}
    kind: str = value[TAG]
    content: Any = value.get("value")
    if kind in ("dict", "ordered dict", "defaultdict"):
        items = [(decode(k), decode(v, read)) for k, v in content]
        if kind == "defaultdict":
            return defaultdict(_FACTORIES[value["default"]], items)
        return OrderedDict(items) if kind == "ordered dict" else dict(items)
    if kind == "deque":
        return deque((decode(v, read) for v in content), value.get("maxlen"))
    if kind in ("tuple", "set", "frozenset"):
        make = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind]
        return make(decode(v, read) for v in content)
    if kind == "elsewhere" and read is not None:
        return read(content)
    if kind == "float":
        return float(content)
    if kind == "complex":
        return complex(float(content[0]), float(content[1]))
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "dtype":
        return _DTYPES[content]
    if kind == "device":
        return torch.device(content)
    if kind == "tensor":
        dtype = _DTYPES[value["dtype"]]
        raw = bytearray(base64.b64decode(content))
        data = (
            torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype, device="cpu")
        )
        return data.reshape(value["shape"]).clone()
    raise ValueError(f"Unknown tag {kind!r}: written by a newer version of fsdp2?")
