"""The store in which the hosts of an elastic training meet (see elastic.sh).

    python examples/clusters/store.py [--port 29500] [--run fsdp2]

It holds who takes part, a few kilobytes. Run it where nothing is trained: with it ends what
torchrun knows of the hosts, and training starts again when a new one is there, at the same address.
"""

from __future__ import annotations

import argparse
import base64
import pickle
import time
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

# What torchrun writes for "nobody has come yet".
EMPTY = C10dRendezvousBackend._NULL_SENTINEL


def reopen(store: dist.Store, key: str) -> bool:
    """Open a rendezvous that was closed; whether it was.

    When torchrun ends on any host by an error (its link was cut, say), it closes the rendezvous for
    all hosts and for good: none of them could ever start again under this name.
    """
    written, state = read(store, key)
    if state is None or not state.closed:
        return False
    # Who takes part stays. (With an empty state a host that comes would start alone, beside those
    # that train: nobody would tell them.)
    state.closed = False
    return write(store, key, state, written)


def read(store: dist.Store, key: str) -> tuple[bytes, Any]:
    """What torchrun has written, and as an object; None if there is nothing."""
    written = store.get(key) if store.check([key]) else EMPTY.encode()
    return written, None if written == EMPTY.encode() else pickle.loads(base64.b64decode(written))


def write(store: dist.Store, key: str, state: Any, instead_of: bytes) -> bool:
    """Write a state, but not if a host has written in the meantime: that would be lost."""
    changed = base64.b64encode(pickle.dumps(state))
    return store.compare_set(key, instead_of.decode(), changed.decode()) == changed


class Spares:
    """Hosts for which there is no room: they wait without stopping those that train.

    torchrun starts the training again for every host that waits. Where two come at once and there
    is room for one, the other goes on waiting, and torch starts the training again and again,
    without a step in between. A host that still waits when the next round is under way has found no
    room: it goes on torch's list of spares, from which it is taken when a host is lost.
    """

    def __init__(self) -> None:
        self._since: dict[Any, int] = {}  # for each host that waits, the round before its first

    def look(self, store: dist.Store, key: str) -> int:
        """How many hosts became spares."""
        written, state = read(store, key)
        if state is None:
            return 0
        self._since = {host: self._since.get(host, state.round) for host in state.wait_list}
        found = [host for host, since in self._since.items() if since < state.round]
        if not (state.complete and found):
            return 0
        state.wait_list.difference_update(found)
        state.redundancy_list.update(found)
        return len(found) if write(store, key, state, written) else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, default=29500)
    parser.add_argument("--run", default="fsdp2", help="as RUN of elastic.sh")
    options = parser.parse_args()
    store = dist.TCPStore("0.0.0.0", options.port, is_master=True, wait_for_workers=False)
    print(f"hosts meet at port {store.port}", flush=True)
    key, spares = f"torch.rendezvous.{options.run}", Spares()
    while True:
        if reopen(store, key):
            print("the rendezvous was closed, and is open again", flush=True)
        if number := spares.look(store, key):
            print(f"{number} more hosts than there is room for: spares", flush=True)
        time.sleep(1)


if __name__ == "__main__":
    main()
