"""torch's flight recorder: its last collectives of this process, written to a file during a hang.

torch notes each collective of NCCL and gloo in a ring in memory: sizes, dtypes, state, the stack of
the call. `torchfrtrace` (with torch) compares the files of all ranks. What is sent as messages and
read from other processes' memory is not in it.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

from ..common.torch_private import find

PREFIX = "rank_"  # what torchfrtrace is given as --prefix
_RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")  # of NCCL; of gloo, from torch 2.9 on


def dump(folder: str | os.PathLike[str], rank: int) -> Path | None:
    """Write what the recorder has into ``folder``.

    Both recorders are asked, and the one with more entries is kept: a job on GPUs has few
    collectives of gloo. (One file per rank is what torchfrtrace reads.)

    Returns:
        The file; None if this torch has no recorder, or it has recorded nothing.
    """
    kept, most = b"", 0
    for name in _RECORDERS:
        found = _read(name)
        if found is not None and found[1] > most:
            kept, most = found
    if not most:
        return None
    path = Path(folder) / f"{PREFIX}{rank}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(kept)
    return path


def _read(name: str) -> tuple[bytes, int] | None:
    """The pickled record, and how many entries it has."""
    try:
        data = find(f"torch._C._distributed_c10d.{name}")()
    except (AttributeError, ImportError):
        return None
    except RuntimeError:  # of a backend that is broken: nothing to tell
        return None
    return data, len(pickle.loads(data).get("entries", ()))  # (torch's own, of this process)
