"""`fsdp2 doctor`, started on ranks as a launcher starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: about its command line", allow_module_level=True)

from benchmarks import hosts
from example_runs import TIMEOUT_S, environment, free_port
from fsdp2.cli.main import main
from fsdp2.doctor import speed

DOCTOR = ("-m", "fsdp2", "doctor")
# Ranks compute for so long to tell their speed, and send so much to tell that of links, which
# are not what is tested here.
BURSTS_S = 0.01
MESSAGE = ("--message", "1MiB")


def run_rank(environment: dict[str, str], hangs: bool, output: str, *options: str) -> None:
    """What a process does that the fork server started."""
    os.environ.update(environment)
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if hangs:
        dist.init_process_group = lambda *args, **settings: time.sleep(100)
    speed._SECONDS = BURSTS_S
    code = main(["doctor", *MESSAGE, *options])
    sys.stdout.flush()
    os._exit(code)


class Rank:
    """A process that runs the doctor as one rank."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        port: int,
        *options: str,
        hangs: bool = False,
        **more: str,
    ) -> None:
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **more,
        }
        self.output = folder / f"output-{rank}"
        self.process = harness.fork_context().Process(
            target=run_rank, args=(variables, hangs, str(self.output), *options)
        )
        self.process.start()

    def finish(self) -> tuple[int | None, str]:
        """Exit code and output."""
        try:
            self.process.join(TIMEOUT_S)
            return self.process.exitcode, self.output.read_text()
        finally:
            self.process.kill()


def assert_in_order(told: str, folder: Path) -> None:
    found = json.loads(told)
    assert [each["rank"] for each in found["facts"]] == [0, 1, 2]
    assert {(link["rank"], link["to"]) for link in found["links"]} == {(0, 1), (0, 2), (1, 2)}
    assert all(link["bytes_per_s"] > 0 and abs(link["clock_s"]) < 1 for link in found["links"])
    assert [each["backend"] for each in found["communicators"]] == ["gloo"]
    assert {tuple(each["seen"]) for each in found["folders"].values()} == {(0, 1, 2)}
    assert not [each for each in found["findings"] if each["level"] == "error"]
    assert not list(folder.iterdir())  # it cleans up


def test_a_job_in_order(tmp_path: Path) -> None:
    port, folder = free_port(), tmp_path / "folder"
    folder.mkdir()
    options = ("--json", "--folder", str(folder))
    ranks = [Rank(tmp_path, rank, 3, port, *options) for rank in range(3)]
    (code, out), *others = [rank.finish() for rank in ranks]
    assert [code, *others] == [0, (0, ""), (0, "")], out
    assert_in_order(out, folder)


@pytest.mark.long
def test_a_job_in_order_that_torchrun_starts(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "3", *DOCTOR, "--json", "--folder", str(tmp_path)),
        ],
        env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert_in_order(done.stdout, tmp_path)


def test_a_rank_alone_needs_no_launcher(tmp_path: Path) -> None:
    process = harness.fork_context().Process(
        target=run_rank, args=({}, False, str(tmp_path / "output"))
    )
    process.start()
    process.join(TIMEOUT_S)
    assert process.exitcode == 0
    assert "1 of 1 rank answered, on 1 host" in (tmp_path / "output").read_text()


def test_a_rank_that_was_not_started_is_named(tmp_path: Path) -> None:
    port = free_port()
    ranks = [Rank(tmp_path, rank, 3, port, "--timeout", "2") for rank in (0, 1)]
    (code, out), (other, _) = [rank.finish() for rank in ranks]
    assert (code, other) == (1, 1)
    assert "2 of 3 ranks answered" in out
    assert "ERROR  arrival: No answer from rank 2 in time" in out


def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    port = free_port()
    ranks = [Rank(tmp_path, r, 3, port, "--timeout", "2", hangs=r == 2) for r in range(3)]
    try:
        (code, out), (other, _) = [rank.finish() for rank in ranks[:2]]
    finally:
        ranks[2].process.kill()
    assert (code, other) == (1, 1)
    host = os.uname().nodename
    assert f"ERROR  communicators: No answer from rank 2 (on {host}) in time" in out


def test_a_rank_without_rank_0_says_so(tmp_path: Path) -> None:
    code, out = Rank(tmp_path, 1, 2, free_port(), "--timeout", "2").finish()
    assert code == 1
    assert "Rank 1 cannot reach 127.0.0.1:" in out


def test_hosts_that_were_restarted_a_different_number_of_times(tmp_path: Path) -> None:
    """torchrun counts on each host what failed there, and may keep the store over starts."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    kept = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    for start in range(2):  # the second finds what the first one has written
        ranks = [
            Rank(
                tmp_path, rank, 2, server.port, "--timeout", "20",
                **kept, TORCHELASTIC_RESTART_COUNT=str(start * rank),
            )
            for rank in (1, 0)
        ]  # fmt: skip
        (other, told), (code, out) = [rank.finish() for rank in ranks]
        assert (code, other) == (0, 0), out + told
        assert "2 of 2 ranks answered" in out
    alone = Rank(tmp_path, 1, 2, server.port, "--timeout", "1", **kept)
    code, out = alone.finish()
    assert code == 1
    assert "Rank 1 reaches the store, but rank 0 did not do so within 1 s" in out


def test_folders_that_are_not_one(tmp_path: Path) -> None:
    port = free_port()
    for name in "ab":
        (tmp_path / name).mkdir()
    ranks = [
        Rank(tmp_path, r, 3, port, "--folder", str(tmp_path / name), "--need", "5000TB")
        for r, name in enumerate(("a", "b", "missing"))
    ]
    (code, out), *_ = [rank.finish() for rank in ranks]
    assert code == 1
    assert "ranks 0, 1 do not see the files of all other ranks" in out
    assert f"rank 2 cannot write there: {tmp_path}/missing: No such file or directory" in out
    assert "TiB are needed" in out
    for name in "ab":
        assert not list((tmp_path / name).iterdir())


@pytest.mark.long
@pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not())
def test_the_speed_of_links_between_hosts() -> None:
    with hosts.hosts(2, mbits=80) as both:
        variables = {"MASTER_ADDR": both[0].address, "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
        ranks = [
            subprocess.Popen(
                host.python(*DOCTOR, "--json", "--message", "2MiB"),
                env=host.environment(RANK=str(rank), LOCAL_RANK="0", **variables),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank, host in enumerate(both)
        ]  # fmt: skip
        (out, err), *_ = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
        assert ranks[0].returncode == 0, err
        found = json.loads(out)
        assert [each["address"] for each in found["facts"]] == [host.address for host in both]
        (link,) = found["links"]
        # 80 megabits are ten megabytes; a bucket of 64 kB passes at once.
        assert 2e6 < link["bytes_per_s"] < 1.1e7
