"""CRC32 from the fastest library that is installed; all compute the same numbers.

zlib is always there (2 to 3 GB/s). ``isal`` uses the processor's carry-less multiplication, which
is tens of times faster: ``pip install fsdp2[fast]``.
"""

from __future__ import annotations

import importlib
import importlib.util
import zlib
from collections.abc import Callable

LIBRARY = "isal" if importlib.util.find_spec("isal") else "zlib"
crc32: Callable[..., int] = (
    importlib.import_module("isal.isal_zlib").crc32 if LIBRARY == "isal" else zlib.crc32
)
