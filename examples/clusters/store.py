"""The store in which the hosts of an elastic training meet (see elastic.sh).

    python examples/clusters/store.py [--port 29500]

It holds who takes part, a few kilobytes. Run it where nothing is trained: with it ends what
torchrun knows of the hosts, and training starts again when a new one is there, at the same address.
"""

from __future__ import annotations

import argparse
import signal

import torch.distributed as dist

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--port", type=int, default=29500)
options = parser.parse_args()
store = dist.TCPStore("0.0.0.0", options.port, is_master=True, wait_for_workers=False)
print(f"hosts meet at port {store.port}", flush=True)
signal.sigwait({signal.SIGINT, signal.SIGTERM})
