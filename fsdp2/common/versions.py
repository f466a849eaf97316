"""The version of this package, and the versions of torch that it supports.

This file imports nothing else of the package: the warning about torch must come before anything
can fail on it. It does not import torch either, so that ``fsdp2 --help`` starts fast.
"""

from __future__ import annotations

import re
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

__version__ = "0.1.0.dev0"

# (major, minor). CI runs the tests on the newest, and a part of them on 2.13.
OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 15)


def tested_torch() -> tuple[str, ...]:
    """The releases of torch that are supported: ``("2.11", "2.12", ...)``."""
    major, oldest = OLDEST_TORCH
    return tuple(f"{major}.{minor}" for minor in range(oldest, NEWEST_TORCH[1] + 1))


def installed_torch() -> str | None:
    """The version of torch (``"2.15.0+cpu"``) without importing it; None where it is not found.

    This reads the file from which torch itself takes its version. The metadata of the distribution
    take longer to read, and may lack the part after the ``+``.
    """
    loaded = getattr(sys.modules.get("torch"), "__version__", None)
    if loaded is not None:
        return str(loaded)
    spec = find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, "version.py")
        text = path.read_text() if path.exists() else ""
        found = re.search(r"""^__version__ *= *["'](.+)["']""", text, re.MULTILINE)
        if found is not None:
            return found[1]
    return None


def warn_if_untested(torch_version: str) -> bool:
    """Warn if ``torch_version`` (``"2.15.0+cpu"``) is not one of `tested_torch`; returns whether.

    The package still works on most versions: torch's public API rarely changes. If a private name
    that we need is gone, `fsdp2.common.torch_private` raises an error with the name.
    """
    major, minor = torch_version.split(".")[:2]
    if f"{major}.{minor}" in tested_torch():
        return False
    warnings.warn(
        f"fsdp2 {__version__} supports torch {tested_torch()[0]} to {tested_torch()[-1]}, "
        f"and this is torch {torch_version}: compare some steps with one process before you rely "
        "on it",
        stacklevel=2,
    )
    return True


if (_installed := installed_torch()) is not None:
    warn_if_untested(_installed)
