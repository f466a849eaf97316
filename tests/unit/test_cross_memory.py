"""Reading memory by address: here that of this process, which is always permitted."""

from __future__ import annotations

import os
import sys

import pytest
import torch

import harness

if harness.RUNS_ON_TORCH or not sys.platform.startswith("linux"):
    pytest.skip("fsdp2 on Linux only", allow_module_level=True)

from fsdp2.transports.host import cross_memory
from fsdp2.transports.host.cross_memory import ReadError, read
from fsdp2.transports.host.sums import cut, cut_length


def ranges(tensor: torch.Tensor, sizes: list[int]) -> list[int]:
    found, address = [], tensor.data_ptr()
    for size in sizes:
        found += [address, size]
        address += size
    return found


@pytest.mark.parametrize("num", [1, 3, 2500])
def test_ranges_are_copied_one_by_one(num: int) -> None:
    """Also more of them than one call takes."""
    source = torch.arange(2 * num, dtype=torch.uint8)
    target = torch.zeros_like(source)
    read(os.getpid(), ranges(target, [2] * num), ranges(source, [2] * num))
    assert torch.equal(source, target)


def test_what_one_call_leaves_is_read_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.arange(40, dtype=torch.uint8)
    target = torch.zeros_like(source)
    real = cross_memory._readv()
    assert real is not None
    counts: list[int] = []

    def only_some(pid: int, into: object, num: int, theirs: object, *rest: int) -> int:
        whole = real(pid, into, 1, theirs, 1, 0)  # the first range
        counts.append(min(whole, 7))
        target[sum(counts) :] = 0
        return counts[-1]

    monkeypatch.setattr(cross_memory, "_readv", lambda: only_some)
    read(os.getpid(), ranges(target, [10, 30]), ranges(source, [10, 30]))
    assert torch.equal(source, target)
    assert counts == [7, 3, 7, 7, 7, 7, 2]


def test_errors() -> None:
    source, target = torch.ones(8), torch.zeros(8)
    with pytest.raises(ReadError, match="offers 1 ranges of 32 bytes, 1 of 16 bytes are expected"):
        read(os.getpid(), ranges(target, [16]), ranges(source, [32]))
    with pytest.raises(ReadError, match=f"memory of process {os.getpid()}"):
        read(os.getpid(), ranges(target, [16]), [8, 16])
    assert not target.any()


@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 100, 4096])
@pytest.mark.parametrize("num", [2, 3, 8])
def test_parts_come_to_the_whole(numel: int, num: int) -> None:
    whole = torch.arange(numel)
    parts = cut(whole, num)
    assert len(parts) == num
    assert torch.equal(torch.cat(parts), whole)
    assert len(parts[0]) == min(numel, cut_length(numel, num))
    assert all(len(part) % 16 == 0 for part in parts if part is not parts[-1] and len(part)) or (
        numel % 16
    )
