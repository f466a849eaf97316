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

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

# What torchrun writes for "nobody has come yet".
EMPTY = C10dRendezvousBackend._NULL_SENTINEL


def reopen(store: dist.Store, key: str) -> bool:
    """Open a rendezvous that was closed; whether it was.

    When torchrun ends on any host by an error (its link was cut, say), it closes the rendezvous for
    all hosts and for good: none of them could ever start again under this name.
    """
    if not store.check([key]):
        return False
    state = store.get(key)
    if state == EMPTY.encode() or not pickle.loads(base64.b64decode(state)).closed:
        return False
    store.set(key, EMPTY)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, default=29500)
    parser.add_argument("--run", default="fsdp2", help="as RUN of elastic.sh")
    options = parser.parse_args()
    store = dist.TCPStore("0.0.0.0", options.port, is_master=True, wait_for_workers=False)
    print(f"hosts meet at port {store.port}", flush=True)
    while True:
        if reopen(store, f"torch.rendezvous.{options.run}"):
            print("the rendezvous was closed, and is open again", flush=True)
        time.sleep(1)


if __name__ == "__main__":
    main()
