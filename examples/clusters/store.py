"""The store through which the hosts of an elastic run find each other (see elastic.sh).

    python examples/clusters/store.py [--port 29500] [--run fsdp2]

It holds the list of hosts, a few kilobytes. Run it on a host that does not train: if the store
ends, torchrun loses the list, and training stops until there is a new store at the same address.
"""

from __future__ import annotations

import argparse
import base64
import pickle
import time
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

# What torchrun writes before the first host has come.
EMPTY = C10dRendezvousBackend._NULL_SENTINEL


def reopen(store: dist.Store, key: str) -> bool:
    """Reopen a rendezvous if it is closed; returns whether it was.

    When torchrun fails on any host (for example, because its link was cut), it closes the
    rendezvous permanently, for all hosts. No host could ever start again under this name.
    """
    written, state = read(store, key)
    if state is None or not state.closed:
        return False
    # Keep the participants. (With an empty state, a new host would start alone next to the hosts
    # that train, and they would not notice it.)
    state.closed = False
    return write(store, key, state, written)


def read(store: dist.Store, key: str) -> tuple[bytes, Any]:
    """The state that torchrun has written, as bytes and as an object; None if there is none."""
    written = store.get(key) if store.check([key]) else EMPTY.encode()
    return written, None if written == EMPTY.encode() else pickle.loads(base64.b64decode(written))


def write(store: dist.Store, key: str, state: Any, instead_of: bytes) -> bool:
    """Write a state, unless a host has written in the meantime, which must not be lost."""
    changed = base64.b64encode(pickle.dumps(state))
    return store.compare_set(key, instead_of.decode(), changed.decode()) == changed


class Spares:
    """Hosts for which there is no room: they wait without interrupting training.

    torchrun restarts training for every host that waits. If two hosts come at once and there is
    room for one, the other keeps waiting, and torch restarts training again and again without a
    step in between. A host that still waits during the next round has found no room, so it moves to
    torch's list of spares. torch takes it from there when a host is lost.
    """

    def __init__(self) -> None:
        self._since: dict[Any, int] = {}  # for each host that waits, the round in which it came

    def look(self, store: dist.Store, key: str) -> int:
        """Move waiting hosts to the spares; returns how many."""
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
    parser.add_argument("--run", default="fsdp2", help="name of the run, RUN in elastic.sh")
    options = parser.parse_args()
    store = dist.TCPStore("0.0.0.0", options.port, is_master=True, wait_for_workers=False)
    print(f"hosts meet at port {store.port}", flush=True)
    key, spares = f"torch.rendezvous.{options.run}", Spares()
    while True:
        if reopen(store, key):
            print("reopened the rendezvous", flush=True)
        if number := spares.look(store, key):
            print(f"{number} new spares: more hosts than there is room for", flush=True)
        time.sleep(1)


if __name__ == "__main__":
    main()
