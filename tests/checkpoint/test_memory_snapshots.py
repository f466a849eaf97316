"""Snapshots in memory: what is restored after processes, hosts and bytes are lost."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from checkpoint_cases import adamw, assert_equal_bits, build, train, whole_state
from checkpoint_crash import exits, fork, memory_folder
from fsdp2.checkpoint import Checkpointer, CheckpointError, MemorySnapshots
from fsdp2.checkpoint.format.disk import Disk
from fsdp2.checkpoint.saving.staging import Staging
from fsdp2.checkpoint.saving.training import capture_training
from fsdp2.snapshots import memory_snapshots
from fsdp2.snapshots.choice import Generation, PartName
from fsdp2.snapshots.folder import Folder, remove_stale
from fsdp2.snapshots.part import write_part
from fsdp2.snapshots.transfer import Peer, Server, TransferError
from harness import cpu_only, distributed, ours_only, run_on, shared_folder

pytestmark = [ours_only("snapshots in memory"), cpu_only("files and sockets")]


LONG = pytest.mark.long


def snapshots(root: str, ranks_per_host: int = 2, **options: Any) -> MemorySnapshots:
    """As on hosts with so many ranks each: a folder for each host."""
    host = dist.get_rank() // ranks_per_host
    directory = Path(root) / f"host{host}"
    directory.mkdir(exist_ok=True)
    options = {"every": 2, "host": f"host{host}", **options}
    return MemorySnapshots("test", directory=directory, **options)


def trained(
    root: str, steps: range, kind: str = "1d", checkpoints: Checkpointer | None = None
) -> dict[str, Tensor]:
    """Train, and end as a killed process does: nothing is closed in order."""
    model = build(kind, seed=steps.start)
    optimizer = adamw(model)
    shots = snapshots(root)
    found = shots.restore(model=model, optimizer=optimizer, checkpoints=checkpoints)
    assert (found.step + 1 if found else 0) == steps.start
    for step in steps:
        train(model, optimizer, range(step, step + 1))
        shots.after_step(
            step, model=model, optimizer=optimizer, extra={"rank": dist.get_rank(), "step": step}
        )
        assert shots.wait(60)
        dist.barrier()  # nobody ends before what is sent to it has arrived
    shots._end()
    return whole_state(model, optimizer)


def restored(root: str, kind: str, expected: dict[str, Tensor], step: int, **told: Any) -> None:
    """What `trained` left is what is found."""
    model = build(kind, seed=7)
    optimizer = adamw(model)
    checkpoints = Checkpointer(Path(root) / "disk") if (Path(root) / "disk").exists() else None
    shots = snapshots(root)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damaged parts
        found = shots.restore(model=model, optimizer=optimizer, checkpoints=checkpoints)
    assert found is not None
    assert (found.step, {k: getattr(found, k) for k in told}) == (step, told)
    if found.same_ranks:
        assert found.extra["rank"] == dist.get_rank()
    assert_equal_bits(whole_state(model, optimizer), expected)
    shots._end()


def first(answers: list[Any]) -> Any:
    return answers[0]


@pytest.fixture
def root() -> Iterator[str]:
    with memory_folder() as folder:
        yield str(folder)


@pytest.mark.parametrize("kind", ["1d", *(pytest.param(k, marks=LONG) for k in ("hsdp", "tp"))])
def test_a_run_goes_on_bit_for_bit(root: str, kind: str) -> None:
    through = first(run_on(4, trained, str(Path(root)), range(5), kind))
    other = Path(root) / "other"
    other.mkdir()
    run_on(4, trained, str(other), range(3), kind)
    again = first(run_on(4, trained, str(other), range(3, 5), kind))
    assert_equal_bits(again, through)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), pytest.param(4, 3, marks=LONG)])
def test_another_number_of_ranks(root: str, before: int, after: int) -> None:
    state = first(run_on(before, trained, root, range(5)))
    run_on(after, restored, root, "1d", state, 4, origin="memory", lost_steps=0)


@pytest.mark.parametrize("host", [0, pytest.param(1, marks=LONG)])
def test_a_lost_host_is_restored_from_its_neighbour(root: str, host: int) -> None:
    state = first(run_on(4, trained, root, range(5)))
    shutil.rmtree(Path(root) / f"host{host}")
    run_on(4, restored, root, "1d", state, 4, origin="memory", lost_steps=0)


def test_half_of_the_hosts_goes_on_alone(root: str) -> None:
    state = first(run_on(4, trained, root, range(5)))
    shutil.rmtree(Path(root) / "host0")
    (Path(root) / "host1").rename(Path(root) / "host0")
    run_on(2, restored, root, "1d", state, 4, same_ranks=False)


def damage(root: str, host: int, step: int, rank: int) -> None:
    """Turn one bit of one file."""
    (file,) = Path(root).glob(f"host{host}/*/*-{step:09d}-*/rank-{rank:05d}-*/model-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)


def test_a_damaged_part_is_taken_from_the_neighbour_then_an_older_one(root: str) -> None:
    before = first(run_on(4, trained, root, range(3)))
    state = first(run_on(4, trained, root, range(3, 5)))
    damage(root, host=0, step=4, rank=1)
    run_on(4, restored, root, "1d", state, 4, origin="memory", lost_steps=0)
    damage(root, host=1, step=4, rank=1)
    assert before
    run_on(4, falls_back, root, 3)


def falls_back(root: str, step: int) -> None:
    model = build("1d", seed=7)
    optimizer = adamw(model)
    shots = snapshots(root)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = shots.restore(model=model, optimizer=optimizer)
    assert found is not None
    assert (found.step, found.lost_steps) == (step, 4 - step)
    shots._end()


def saved_on_disk(root: str, step: int) -> dict[str, Tensor]:
    model = build("1d")
    optimizer = adamw(model)
    train(model, optimizer, range(step))
    (Path(root) / "disk").mkdir(exist_ok=True)
    Checkpointer(Path(root) / "disk").save(
        step, model=model, optimizer=optimizer, extra={"rank": dist.get_rank()}
    )
    return whole_state(model, optimizer)


def test_the_disk_if_it_is_newer_or_all_copies_are_lost(root: str) -> None:
    state = first(run_on(4, trained, root, range(5)))
    on_disk = first(run_on(4, saved_on_disk, root, 3))
    run_on(4, restored, root, "1d", state, 4, origin="memory")
    newer = first(run_on(4, saved_on_disk, root, 6))
    run_on(4, restored, root, "1d", newer, 6, origin="disk", lost_steps=0)
    shutil.rmtree(Path(root) / "disk" / "step-000006")
    for host in ("host0", "host1"):
        shutil.rmtree(Path(root) / host)
    run_on(4, restored, root, "1d", on_disk, 3, origin="disk", last_step=None)


@distributed(4)
def test_two_snapshots_of_each_rank_and_none_after_the_end() -> None:
    with shared_folder() as root:
        model = build("1d")
        optimizer = adamw(model)
        shots = snapshots(root, every=1)
        assert shots.restore(model=model, optimizer=optimizer) is None
        for step in range(5):
            train(model, optimizer, range(step, step + 1))
            assert shots.after_step(step, model=model, optimizer=optimizer) or step
            shots.wait()
            dist.barrier()
        found = {path.name[:16] for path in Path(root).glob("host*/*/0*")}
        assert len(found) == 2
        assert len(list(Path(root).glob("host*/*/0*/rank-*"))) == 2 * 2 * 4
        assert shots.complete is not None
        assert shots.neighbour == (dist.get_rank() + 2) % 4
        shots.close()
        assert not list(Path(root).glob("host*/*"))
        with pytest.raises(CheckpointError, match="are closed"):
            shots.after_step(9, model=model)


@distributed(2)
def test_ranks_that_cannot_take_part() -> None:
    with shared_folder() as root:
        model = nn.Linear(2, 2)
        directory = Path(root) / ("missing" if dist.get_rank() else "")
        with pytest.raises(CheckpointError, match=r"Rank 1: .*missing is not a folder"):
            MemorySnapshots("test", every=1, directory=directory)
        with pytest.raises(CheckpointError, match="in the same folder"):
            MemorySnapshots("test", every=1, directory=root, host=str(dist.get_rank()))
        shots = snapshots(root, 1)
        with pytest.raises(CheckpointError, match="already"):
            shots._folder.lock(dist.get_rank())
        assert shots.after_step(0, model=model)
        shots.wait()
        with pytest.raises(ValueError, match="steps increase"):
            shots.after_step(0, model=model)
        dist.barrier()
        shots._end()


def test_a_lock_that_failed_halfway_is_not_kept(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "test")
    (folder.path / "progress-00000").mkdir()
    with pytest.raises(IsADirectoryError):
        folder.lock(0)
    (folder.path / "progress-00000").rmdir()
    folder.lock(0)
    folder.unlock()


@distributed(2)
def test_too_little_memory_is_said_on_all_ranks() -> None:
    import fsdp2.snapshots.memory_snapshots as module

    with shared_folder() as root:
        shots = snapshots(root, 1)
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank():
                patch.setattr(module, "_free_bytes", lambda path: 10)
            with pytest.raises(CheckpointError, match=r"on the host of rank 1, in .* 10 are free"):
                shots.after_step(0, model=nn.Linear(2, 2))
        shots._end()


@distributed(2)
def test_a_slow_neighbour_makes_all_ranks_leave_one_out() -> None:
    with shared_folder() as root:
        model = nn.Linear(512, 512)
        # 1 MB at 0.7 MB/s, on one rank only.
        limit = 0.7 if dist.get_rank() else None
        shots = snapshots(root, 1, every=1, max_mb_per_s=limit)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            begun = [shots.after_step(step, model=model) for step in range(3)]
        assert begun == [True, False, False]
        assert shots.skipped == 2
        assert len([w for w in caught if "is left out" in str(w.message)]) == 1 - dist.get_rank()
        shots.wait()
        dist.barrier()
        assert shots.after_step(3, model=model)
        assert shots.complete == 0
        shots.close()


@distributed(2)
def test_the_failure_of_the_last_snapshot_is_said_at_the_end() -> None:
    """Nothing comes after it that could say so."""
    with shared_folder() as root:
        model = nn.Linear(4, 4)
        shots = snapshots(root, 1, every=1)
        with pytest.MonkeyPatch.context() as monkeypatch:
            if dist.get_rank() == 1:
                fails = OSError(errno.ENOSPC, "No space left on device")
                monkeypatch.setattr(memory_snapshots, "write_part", Mock(side_effect=fails))
            assert shots.after_step(0, model=model)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                shots.close()
        said = [str(w.message) for w in caught if "is not complete" in str(w.message)]
        assert len(said) == dist.get_rank()
        assert all("OSError: [Errno 28] No space left" in text for text in said)


# -- one process: kills between any two calls, and what must not be heard --------------------------


def part_of(step: int) -> PartName:
    return PartName(Generation(1, step, "abcdef01"), 0, 1)


def write(folder: Folder, step: int) -> None:
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, step)
    captured = capture_training(model, None, None, {"step": step}, (0,), 0)
    write_part(folder, part_of(step), captured, Staging().fill(captured))


def test_a_kill_between_any_two_calls_leaves_whole_parts(tmp_path: Path) -> None:
    """Each call that changes the folder is the last one of a process, once."""
    left = set()
    for last in range(1000):
        directory = tmp_path / str(last)
        directory.mkdir()
        write(Folder(directory, "x"), 1)
        num = 0

        def before(call: str, operand: str, last: int = last) -> None:
            nonlocal num
            num += 1
            if num > last:
                os.kill(os.getpid(), signal.SIGKILL)

        def body(directory: Path = directory) -> None:
            torch.set_num_threads(1)
            folder = Folder(directory, "x", Disk(before))
            write(folder, 2)
            folder.remove({part_of(2).generation}, folder.parts())

        status = exits([fork(body)])[0]
        folder = Folder(directory, "x")
        found = folder.parts()
        for part in found:
            folder.verify(part)
        steps = tuple(part.generation.step for part in found)
        left.add(steps)
        assert steps in ((1,), (1, 2), (2,))
        folder.remove_unfinished()
        assert not list(folder.path.glob(".*"))
        if status == 0:
            break
    assert left == {(1,), (1, 2), (2,)}
    assert 10 < last < 100


def test_a_copy_that_ends_in_the_middle_or_is_damaged_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    here, there = Folder(tmp_path / "a", "x"), Folder(tmp_path / "b", "x")
    server = Server(there, "127.0.0.1", "secret")
    try:
        write(here, 1)
        with Peer("127.0.0.1", server.port, "secret") as peer:
            peer.put(here, part_of(1), [])
        assert there.parts() == [part_of(1)]
        there.verify(part_of(1))
        write(here, 2)
        (file,) = here.path_of(part_of(2)).glob("model-*")
        data = file.read_bytes()
        file.write_bytes(data[:-1] + b"?")
        with (
            pytest.raises(TransferError, match="is damaged near byte"),
            Peer("127.0.0.1", server.port, "secret") as peer,
        ):
            peer.put(here, part_of(2), [part_of(1).generation])
        with (
            pytest.raises(TransferError),
            Peer("127.0.0.1", server.port, "guess") as peer,
        ):
            peer.get(part_of(1), "model-rank-00000.safetensors")
        for name in ("../lock-00000", "/etc/passwd", ".."):
            with (
                pytest.raises(TransferError, match="no name of a file"),
                Peer("127.0.0.1", server.port, "secret") as peer,
            ):
                peer.get(part_of(1), name)
        cut_off(server.port)
        assert there.parts() == [part_of(1)]
        assert not list(there.path.glob(".incoming*"))
    finally:
        server.close()


def test_a_server_without_memory_for_a_thread_says_so_and_serves_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that accepts connections would end, and the other side wait for a minute."""
    told: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(str(args.exc_value)))
    for name in "ab":
        (tmp_path / name).mkdir()
    here, there = Folder(tmp_path / "a", "x"), Folder(tmp_path / "b", "x")
    write(here, 1)
    server = Server(there, "127.0.0.1", "secret")
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", start)
        raise RuntimeError("can't start new thread")

    try:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        began = time.monotonic()
        for is_refused in (True, False):
            with Peer("127.0.0.1", server.port, "secret") as peer:
                if is_refused:
                    with pytest.raises(TransferError):
                        peer.put(here, part_of(1), [])
                else:
                    peer.put(here, part_of(1), [])
        assert time.monotonic() - began < 20
        assert there.parts() == [part_of(1)]
        assert told == ["can't start new thread"]
    finally:
        server.close()


def cut_off(port: int) -> None:
    """Send half of a part, and hang up."""
    from fsdp2.snapshots import transfer

    with Peer("127.0.0.1", port, "secret") as peer:
        asking = transfer._asking("put", part_of(3), files=[["a", 1000]], keep=[])
        asking["keep"] = [part_of(1).generation.name]
        transfer._send(peer._socket, asking)
        peer._socket.sendall(b"x" * 500)
    time.sleep(0.3)


def test_another_job_of_the_name_and_stale_runs(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "x")
    folder.lock(0)
    ready, go = os.pipe()

    def other() -> None:
        mine = Folder(tmp_path, "x")
        from fsdp2.snapshots import folder as module

        module._locked.clear()
        with pytest.raises(CheckpointError, match="Another process is rank 0"):
            mine.lock(0, patience_s=0.1)
        mine.lock(1)
        os.write(go, b"x")
        time.sleep(60)

    pid = fork(other)
    assert os.read(ready, 1) == b"x"
    far = 1e-9
    assert remove_stale(tmp_path, tmp_path / "own", far) == []
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    folder.unlock()
    time.sleep(0.02)
    assert remove_stale(tmp_path, folder.path, far) == []
    assert remove_stale(tmp_path, tmp_path / "own", far) == ["fsdp2-snapshots-x"]
