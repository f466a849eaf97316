"""The ranks meet in a key-value store, phase by phase, so that a hanging rank can be named.

All ranks run each phase and write its outcome. Rank 0 reads the outcomes and decides whether the
next phase begins. This needs only the store, so it works even if the phase (for example, the
creation of a communicator) hangs or fails.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# How long to wait for the end of a phase, at most, in addition to the phase's own timeout.
MAX_GRACE_S = 5.0
# How often rank 0 answers ranks that have knocked, while it waits.
_ANSWER_S = 0.1


class NoMeetingError(RuntimeError):
    """This rank cannot reach any other. The message states what to do."""


class Meeting:
    """The ranks of a job, from the launcher's environment variables.

    Attributes:
        rank, world_size, local_rank: of this process.
        timeout_s: how long to wait for a rank in a phase, in seconds.
        grace_s: how much longer rank 0 waits for the end of a phase, in seconds.
        store: keys and values that all ranks see; None for a single rank.
    """

    def __init__(self, timeout_s: float, environment: Mapping[str, str] = os.environ) -> None:
        self.timeout_s = timeout_s
        self.grace_s = min(MAX_GRACE_S, timeout_s)
        self.rank = int(environment.get("RANK", 0))
        self.world_size = int(environment.get("WORLD_SIZE", 1))
        self.local_rank = int(environment.get("LOCAL_RANK", 0))
        self.store: dist.Store | None = None
        self._lobby: dist.Store | None = None  # of rank 0, where starts share a store
        self._attempt = self._answered = 0
        if self.world_size > 1:
            self.store = self._connect(environment)

    def _connect(self, environment: Mapping[str, str]) -> dist.Store:
        missing = [key for key in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(key)]
        if missing:
            raise NoMeetingError(
                f"{' and '.join(missing)} are not set. Start fsdp2 doctor with the job's launcher: "
                "torchrun ... -m fsdp2 doctor"
            )
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        # torchrun may run the server in its agent, for all attempts of a job.
        by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        serves = self.rank == 0 and not by_agent
        try:
            # Does not wait for workers: the meeting finds out which of them are missing.
            store: dist.Store = dist.TCPStore(
                address,
                port,
                self.world_size,
                is_master=serves,
                timeout=timedelta(seconds=self.timeout_s),
                wait_for_workers=False,
            )
        except (RuntimeError, ValueError) as error:
            does = "serve at" if serves else "reach"
            raise NoMeetingError(
                f"Rank {self.rank} cannot {does} {address}:{port} (MASTER_ADDR and MASTER_PORT): "
                f"{_first_line(error)}. Check that rank 0 is running, that the name resolves to "
                "an address of its host, and that no firewall closes the port"
            ) from error
        store = dist.PrefixStore("fsdp2/doctor", store)
        return self._join(store) if by_agent else store

    def _join(self, store: dist.Store) -> dist.Store:
        """This start's part of a store that may still have keys of earlier starts of the job.

        Each agent counts only the restarts of its host, so hosts could disagree on the number.
        Rank 0 therefore counts the starts. The other ranks knock, and rank 0 answers with the
        number. Knocks are numbered, so an earlier start cannot have answered them.
        """
        if self.rank == 0:
            self._lobby = store
            self._attempt = store.add("attempts", 1)
            return dist.PrefixStore(str(self._attempt), store)
        key = f"answer/{store.add('knocks', 1)}"
        try:
            store.wait([key], timedelta(seconds=self.timeout_s))
        except RuntimeError as error:  # (a DistStoreError)
            raise NoMeetingError(
                f"Rank {self.rank} reaches the store, but rank 0 did not do so within "
                f"{self.timeout_s:g} s. Look at the launcher's log on the host of rank 0: the "
                "process was not started, or it died"
            ) from error
        return dist.PrefixStore(store.get(key).decode(), store)

    def _answer(self) -> None:
        """On rank 0: answer the ranks that have knocked."""
        if self._lobby is None:
            return
        knocks = self._lobby.add("knocks", 0)
        for knock in range(self._answered + 1, knocks + 1):
            self._lobby.set(f"answer/{knock}", str(self._attempt))
        self._answered = knocks

    def phase(self, name: str, work: Callable[[], Any]) -> dict[int, Any] | None:
        """Run one phase on all ranks.

        Args:
            work: this rank's part; its result must be serializable as JSON.

        Returns:
            None on every rank if the phase ended the meeting. Otherwise the results by rank on
            rank 0, and only its own result on any other rank.

        Raises:
            PhaseError: on rank 0, if ranks failed or are missing.
        """
        try:
            told = {"value": work()}
        except Exception as error:  # whatever it is, the others must learn of it
            told = {"error": f"{type(error).__name__}: {_first_line(error)}"}
        if self.store is None:
            if "error" in told:
                raise PhaseError(name, {0: told["error"]}, [])
            return {0: told["value"]}
        self.store.set(f"{name}/{self.rank}", json.dumps(told))
        if self.rank:
            return {self.rank: told.get("value")} if self._decided(name) else None
        said, missing = self._collect(name)
        failed = {rank: each["error"] for rank, each in said.items() if "error" in each}
        values = {rank: each["value"] for rank, each in said.items() if "value" in each}
        self.store.set(f"{name}/go", json.dumps(not (failed or missing)))
        if failed or missing:
            raise PhaseError(name, failed, missing, values)
        return values

    def _collect(self, name: str) -> tuple[dict[int, dict[str, Any]], list[int]]:
        assert self.store is not None
        deadline = time.monotonic() + self.timeout_s + self.grace_s
        said, missing = {}, []
        for rank in range(self.world_size):
            key = f"{name}/{rank}"
            # One after the other: ranks that arrived in the meantime need no further wait.
            if self._comes(key, deadline):
                said[rank] = json.loads(self.store.get(key))
            else:
                missing.append(rank)
        return said, missing

    def _comes(self, key: str, deadline: float) -> bool:
        """Whether a rank has written before the deadline; answers knocks in the meantime."""
        while True:
            self._answer()
            left = max(0.01, deadline - time.monotonic())
            if self._wait(key, left if self._lobby is None else min(left, _ANSWER_S)):
                return True
            if time.monotonic() > deadline:
                return False

    def _decided(self, name: str) -> bool:
        assert self.store is not None
        # Rank 0 may be in the phase for as long as its timeout, and then wait for the others.
        patience = 2 * self.timeout_s + 2 * self.grace_s
        return self._wait(f"{name}/go", patience) and json.loads(self.store.get(f"{name}/go"))

    def _wait(self, key: str, timeout_s: float) -> bool:
        assert self.store is not None
        try:
            self.store.wait([key], timedelta(seconds=timeout_s))
        except RuntimeError:  # (a DistStoreError)
            return False
        return True

    def end(self, code: int) -> int:
        """Agree on the exit code of rank 0; the server stays until all have read it."""
        if self.store is None:
            return code
        try:
            if self.rank == 0:
                self.store.set("code", str(code))
                deadline = time.monotonic() + self.grace_s
                for rank in range(1, self.world_size):
                    self._wait(f"bye/{rank}", max(0.01, deadline - time.monotonic()))
                return code
            if not self._wait("code", 2 * self.timeout_s + 2 * self.grace_s):
                return 1
            code = int(self.store.get("code"))
            self.store.set(f"bye/{self.rank}", "")
        except RuntimeError:
            return 1  # rank 0 is gone
        return code


def _first_line(error: Exception) -> str:
    """The first line of the message: C++ adds a trace."""
    return next(iter(str(error).splitlines()), "")


class PhaseError(RuntimeError):
    """A phase that failed, or that some ranks did not finish.

    Attributes:
        name: of the phase.
        failed: messages by rank.
        missing: ranks that did not answer.
        values: results of the other ranks, by rank.
    """

    def __init__(
        self,
        name: str,
        failed: dict[int, str],
        missing: list[int],
        values: dict[int, Any] | None = None,
    ) -> None:
        super().__init__(name)
        self.name, self.failed, self.missing, self.values = name, failed, missing, values or {}
