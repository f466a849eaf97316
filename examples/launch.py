"""torchrun for one machine, with its own defaults and without tracebacks for expected exits.

    python examples/launch.py [--nproc-per-node N] script.py [options of the script]

is the same as `torchrun --standalone --nproc-per-node N script.py ...`. N defaults to the number of
GPUs, or to 2 without GPUs. Two exits do not count as failures and print no traceback:

- Ctrl-C (exit status 130): the ranks may still finish their step and save;
- a mistake in the options (exit status 2): rank 0 reports it in one line.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import sys

from common.options import OneLineParser, positive

USAGE_ERROR, INTERRUPTED = 2, 130


def main() -> int:
    parser = OneLineParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nproc-per-node", type=positive, metavar="N", help="number of processes")
    parser.add_argument("script")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the script")
    given = parser.parse_args()

    # Until torchrun handles Ctrl-C, it ends this process without a traceback. torch is imported
    # after this line, because the import takes seconds.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    import torch
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    num_ranks = given.nproc_per_node or torch.cuda.device_count() or 2
    # The ranks share the cores; more threads than cores would slow all of them.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    command = ["--standalone", "--nproc-per-node", str(num_ranks), given.script, *given.options]
    print("+ torchrun", shlex.join(command), flush=True)
    # torchrun logs a failure and also raises it; once is enough.
    logging.disable(logging.ERROR)
    try:
        torchrun.main(command)
    except SignalException:
        return INTERRUPTED
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode == USAGE_ERROR:
            return USAGE_ERROR
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
