"""The state of random number generators, as JSON."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from ..format.values import decode, encode


def random_states() -> dict[str, Any]:
    """States of Python's, NumPy's (if imported) and torch's generators, CPU and this device."""
    states: dict[str, Any] = {
        "python": encode(random.getstate()),
        "torch": encode(torch.get_rng_state()),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = encode([kind, keys.tolist(), *rest])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        states["device"] = encode(module.get_rng_state())
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Restore what `random_states` returned."""
    random.setstate(decode(states["python"]))
    torch.set_rng_state(decode(states["torch"]))
    if "numpy" in states:
        import numpy as np

        kind, keys, *rest = decode(states["numpy"])
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if "device" in states and accelerator is not None:
        torch.get_device_module(accelerator).set_rng_state(decode(states["device"]))
