"""A process that ends by an error says so, whatever its threads wait for."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: about its exchanges", allow_module_level=True)

from exit_while_exchanging import CANNOT_READ, NUM_RANKS, WAYS
from fsdp2.transports.host import links as host_links
from fsdp2.transports.host.links import _Served

pytestmark = harness.cpu_only("gloo")
SUPPORT = Path(__file__).parents[1] / "support"
SCRIPT = SUPPORT / "exit_while_exchanging.py"
ENVIRONMENT = {
    **os.environ,
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": f"{SUPPORT.parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks of all ways, which ran beside each other, have left what became of them."""
    folder = tmp_path_factory.mktemp("ended")
    command = [sys.executable, str(SCRIPT), str(folder)]
    with subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True) as forks:
        try:
            assert forks.wait(harness.JOB_TIMEOUT_S) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(forks.pid, signal.SIGKILL)
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_an_error_while_a_thread_waits_for_messages_ends_with_its_exit_code(
    way: str, ended: Path
) -> None:
    codes = [int((ended / way / f"exit-{rank}").read_text()) for rank in range(NUM_RANKS)]
    said = [(ended / way / f"stderr-{rank}").read_text() for rank in range(NUM_RANKS)]
    if codes == [CANNOT_READ] * NUM_RANKS:
        pytest.skip("processes may not read each other's memory here")
    assert codes == [1, 0, 0], said
    assert said[0].rstrip().endswith("ValueError: planned"), said[0]


def test_the_thread_that_serves_late_exchanges_ends_at_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for num_unread in (0, 1):
        served = _Served()
        monkeypatch.setattr(host_links, "_served", served)
        served.note_unread(1)
        served.note_unread(num_unread - 1)
        thread = served.thread
        assert isinstance(thread, threading.Thread)
        assert thread.is_alive()
        served.end()
        assert not thread.is_alive()
        served.epoll.close()


AT_EXIT = """
import atexit
seen = []
# The first to be registered is the last to be called.
atexit.register(lambda: print("alive" if seen[0].is_alive() else "ended"))
from fsdp2.transports.host import links as host_links
host_links._served.note_unread(1)
seen.append(host_links._served.thread)
"""


def test_the_thread_has_ended_before_the_interpreter_does() -> None:
    """Or it wakes up in an interpreter that is gone, and the process aborts."""
    command = [sys.executable, "-c", AT_EXIT]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
