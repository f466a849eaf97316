"""Hosts on one machine: network namespaces with addresses of their own, on links of known speed.

A bridge connects them, as a switch does. Needs root, `ip` and `tc` (package iproute2); where they
are not there or not permitted, `why_not` says why.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_count = 0


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


@functools.cache
def why_not() -> str:
    """Why there can be no hosts here; "" if there can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"no {' and '.join(missing)} (package iproute2)"
    if os.geteuid():
        return "network namespaces need root"
    try:
        with hosts(1, mbits=100):
            return ""
    except RuntimeError as error:
        return f"network namespaces are not permitted: {error}"


@dataclass(frozen=True)
class Host:
    """One namespace.

    Attributes:
        address: of its interface `eth0`.
    """

    name: str
    address: str

    def command(self, *command: str) -> list[str]:
        """``command``, to be run on this host."""
        return ["ip", "netns", "exec", self.name, *command]

    def python(self, *arguments: str) -> list[str]:
        return self.command(sys.executable, *arguments)

    def environment(self, **variables: str) -> dict[str, str]:
        """Of this process, with what makes gloo use the host's own address."""
        found = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        return found | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables

    def limit(self, mbits: float | None) -> None:
        """Limit what it sends, in megabits per second; None: no limit."""
        tbf = ("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf")
        if mbits is None:
            with suppress(RuntimeError):  # there was no limit
                _run(*self.command("tc", "qdisc", "del", "dev", "eth0", "root"))
            return
        # A bucket of what the link carries in 2 ms, and of no less than a few large packets; a
        # queue that is never full, since drops would make this a test of TCP.
        burst = max(int(mbits * 1e6 / 8 * 2e-3), 200_000)
        rate = ("rate", f"{int(mbits * 1e6)}bit", "burst", str(burst), "limit", str(64 * 2**20))
        _run(*self.command(*tbf, *rate))

    def cut(self) -> None:
        """Take its cable out: nothing answers any more, and nobody is told."""
        _run(*self.command("ip", "link", "set", "eth0", "down"))

    def mend(self) -> None:
        """Put the cable back in."""
        _run(*self.command("ip", "link", "set", "eth0", "up"))

    def processes(self) -> list[int]:
        """The ids of all processes that run on it."""
        done = subprocess.run(("ip", "netns", "pids", self.name), capture_output=True, text=True)
        return [int(pid) for pid in done.stdout.split()]

    def kill(self) -> None:
        """End all of its processes at once, as when its power fails."""
        while found := self.processes():
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


@contextmanager
def hosts(count: int, *, mbits: float | None = None) -> Iterator[list[Host]]:
    """``count`` hosts on one switch.

    Args:
        mbits: what each sends at most, in megabits per second; None: no limit.
    """
    global _count
    _count += 1
    # Of the process: test files run at the same time. Names of interfaces have 15 characters.
    base = f"f{os.getpid() % 100000}-{_count}"
    net = f"10.{os.getpid() % 200 + 20}.{_count % 250}"
    made: list[Sequence[str]] = []
    found = []
    try:
        _run("ip", "link", "add", f"{base}br", "type", "bridge")
        made.append(("ip", "link", "del", f"{base}br"))
        _run("ip", "link", "set", f"{base}br", "up")
        for i in range(count):
            host = Host(f"{base}h{i}", f"{net}.{i + 1}")
            _run("ip", "netns", "add", host.name)
            made.append(("ip", "netns", "del", host.name))
            outside, inside = f"{base}o{i}", f"{base}i{i}"
            _run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside)
            _run("ip", "link", "set", outside, "master", f"{base}br", "up")
            _run("ip", "link", "set", inside, "netns", host.name, "name", "eth0")
            _run(*host.command("ip", "addr", "add", f"{host.address}/24", "dev", "eth0"))
            for device in ("lo", "eth0"):
                _run(*host.command("ip", "link", "set", device, "up"))
            if mbits is not None:
                host.limit(mbits)
            found.append(host)
        yield found
    finally:
        for command in reversed(made):
            with suppress(RuntimeError):
                _run(*command)
