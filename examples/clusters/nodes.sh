#!/usr/bin/env bash
# Start a run on several nodes. Run the same command on every node:
#
#     HEAD=node0 NODES=4 RANKS=8 bash examples/clusters/nodes.sh examples/train_lm.py --out /shared/lm
#
# HEAD   name or address at which the other nodes reach one of them
# PORT   a free port on that node
# NODES  number of nodes
# RANKS  processes per node: the number of its GPUs
set -euo pipefail

: "${HEAD:?set HEAD to the name or address of one of the nodes}"
PORT="${PORT:-29500}"
NODES="${NODES:-2}"
RANKS="${RANKS:-8}"

# torchrun numbers the nodes, which meet at HEAD:PORT.
exec torchrun \
    --nnodes "$NODES" --nproc-per-node "$RANKS" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:$PORT" --rdzv-id "${RUN:-fsdp2}" \
    "$@"
