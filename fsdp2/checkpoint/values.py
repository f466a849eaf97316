"""Small state as JSON, exactly: what plain JSON would change is written with a tag.

Numbers that JSON has no word for (nan, infinities), tuples, bytes, dicts with keys that are not
strings, sets, and small tensors keep their types. Nothing is ever executed when such a file is
read, which is why this is not pickle. Example::

    >>> decode(encode({"betas": (0.9, 0.95), "best": float("inf")}))
    {'betas': (0.9, 0.95), 'best': inf}
"""

from __future__ import annotations

import base64
import math
from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch

TAG = "$"


def encode(value: Any, where: str = "value") -> Any:
    """Turn ``value`` into what `json.dumps` writes without loss.

    Args:
        value: None, bool, int, float, complex, str, bytes, tensors, torch.dtype, torch.device,
            and lists, tuples, sets and dicts of these.
        where: the name of ``value`` in an error message.

    Raises:
        TypeError: for any other type, with the place of the value.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {TAG: "float", "value": repr(float(value))}
    if isinstance(value, list):
        return [encode(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, dict | OrderedDict) and not isinstance(value, defaultdict):
        if all(isinstance(key, str) for key in value) and TAG not in value:
            return {key: encode(v, f"{where}[{key!r}]") for key, v in value.items()}
        items = [[encode(k, where), encode(v, f"{where}[{k!r}]")] for k, v in value.items()]
        return {TAG: "dict", "value": items}
    return _encode_tagged(value, where)


def _encode_tagged(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, tuple | set | frozenset | deque):
        kind = next(k for k in (tuple, set, frozenset, deque) if isinstance(value, k)).__name__
        content = [encode(v, f"{where}[{i}]") for i, v in enumerate(value)]
        if isinstance(value, deque):
            return {TAG: kind, "value": content, "maxlen": value.maxlen}
        return {TAG: kind, "value": content}
    if isinstance(value, defaultdict):
        return encode(dict(value), where)
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


def decode(value: Any) -> Any:
    """The inverse of `encode`. Tensors come back on the CPU."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: decode(v) for key, v in value.items()}
    kind: str = value[TAG]
    content: Any = value.get("value")
    if kind == "dict":
        return {decode(k): decode(v) for k, v in content}
    if kind == "deque":
        return deque((decode(v) for v in content), value.get("maxlen"))
    if kind in ("tuple", "set", "frozenset"):
        make = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind]
        return make(decode(v) for v in content)
    if kind == "float":
        return float(content)
    if kind == "complex":
        return complex(float(content[0]), float(content[1]))
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "device":
        return torch.device(content)
    if kind == "tensor":
        dtype = getattr(torch, value["dtype"])
        raw = bytearray(base64.b64decode(content))
        data = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return data.reshape(value["shape"]).clone()
    raise ValueError(f"Unknown tag {kind!r}: written by a newer version of fsdp2?")
