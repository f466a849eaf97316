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


def checked_random_states(states: dict[str, Any]) -> dict[str, Any]:
    """Decode what `random_states` returned, and try it on other generators.

    Raises:
        ValueError, TypeError, ...: whatever a generator raises for a state that is none.
    """
    found = {"python": decode(states["python"]), "torch": decode(states["torch"])}
    random.Random().setstate(found["python"])
    torch.Generator().set_state(found["torch"])
    if "numpy" in states:
        import numpy as np

        kind, keys, position, *rest = decode(states["numpy"])
        # NumPy takes any position, and then reads numbers from memory behind its keys.
        if kind != "MT19937" or type(position) is not int or not 0 <= position <= len(keys) == 624:
            raise ValueError(f"a state of NumPy's generator {kind!r:.40} at {position!r:.40}")
        found["numpy"] = (kind, np.array(keys, dtype=np.uint32), position, *rest)
        np.random.RandomState().set_state(found["numpy"])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if "device" in states and accelerator is not None:
        found["device"] = decode(states["device"])
        torch.Generator(accelerator).set_state(found["device"])
    return found


def set_random_states(states: dict[str, Any]) -> None:
    """Restore what `checked_random_states` returned."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(states["numpy"])
    if "device" in states:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        torch.get_device_module(accelerator).set_rng_state(states["device"])
