"""torch's flight recorder, written to a file."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: its reports", allow_module_level=True)

from fsdp2.describe.flight_records import dump

C10D = torch._C._distributed_c10d
Recorder = Callable[[], bytes]


def recorder(entries: int) -> Recorder:
    """As torch has them: `entries` collectives, pickled."""
    return lambda: pickle.dumps(
        {"version": "2.10", "entries": [{"op_id": i} for i in range(entries)]}
    )


def broken() -> bytes:
    raise RuntimeError("no NCCL")


@pytest.mark.parametrize(
    ("nccl", "gloo", "kept"),
    [
        pytest.param(recorder(5), recorder(2), 5, id="a job on GPUs"),
        pytest.param(recorder(0), recorder(2), 2, id="a job on CPUs"),
        pytest.param(None, recorder(2), 2, id="a torch without NCCL"),
        pytest.param(broken, recorder(1), 1, id="NCCL that is broken"),
        pytest.param(recorder(3), None, 3, id="a torch that does not record gloo"),
        pytest.param(recorder(0), recorder(0), None, id="recorders that are turned off"),
        pytest.param(None, None, None, id="no recorder"),
    ],
)
def test_the_record_that_tells_more_is_written(
    nccl: Recorder | None,
    gloo: Recorder | None,
    kept: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, stand_in in (("_dump_nccl_trace", nccl), ("_dump_fr_trace", gloo)):
        if stand_in is None:
            monkeypatch.delattr(C10D, name, raising=False)
        else:
            monkeypatch.setattr(C10D, name, stand_in, raising=False)
    path = dump(tmp_path / "records", 7)
    if kept is None:
        assert path is None
        assert not list(tmp_path.iterdir())
        return
    assert path == tmp_path / "records" / "rank_7"
    assert len(pickle.loads(path.read_bytes())["entries"]) == kept
