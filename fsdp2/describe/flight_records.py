"""torch's flight recorder: the last collectives of this process, written to a file during a hang.

torch records each collective of NCCL and gloo in a ring buffer: sizes, dtypes, state, the stack of
the call. `torchfrtrace` (part of torch) compares the files of all ranks. Messages, and reads from
other processes' memory, are not recorded.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

from ..common.torch_private import find

PREFIX = "rank_"  # the --prefix for torchfrtrace
_RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")  # of NCCL; of gloo, from torch 2.9 on


def dump(folder: str | os.PathLike[str], rank: int) -> Path | None:
    """Write the recorder's entries into ``folder``.

    torchfrtrace reads one file per rank, so of the two recorders, the one with more entries is
    kept: a job on GPUs has few collectives of gloo.

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
