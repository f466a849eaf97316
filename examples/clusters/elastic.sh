#!/usr/bin/env bash
# Start an elastic training: run the same command on every host, and on hosts that come later.
#
#     STORE=node9 NODES=1:2 RANKS=8 bash examples/clusters/elastic.sh \
#         examples/train_lm.py --elastic --out /shared/lm --save-every 100
#
# STORE  the host of the store in which the hosts meet: python examples/clusters/store.py there
# PORT   its port
# NODES  fewest and most hosts to train on
# RANKS  processes per host: the number of its GPUs
# ADDRESS  of this host, as the others reach it; its name if not given
# TRIES  how often to start again when torchrun itself fails
set -uo pipefail

: "${STORE:?set STORE to the name or address of the host of the store}"
PORT="${PORT:-29500}"
NODES="${NODES:-1:2}"
RANKS="${RANKS:-8}"

# A host that is not heard of for 3 times 2 seconds is gone. A round starts 3 seconds after the
# fewest hosts have come, with those that are there.
conf="is_host=false,keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=3,read_timeout=20"

# Each round has a store of its own on the host of rank 0. torch would keep that of the first round,
# and as soon as rank 0 moves to another host, the hosts would wait for each other at two of them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-10}"

# torchrun starts the processes again; the loop starts torchrun again (the store was gone).
for ((try = 0; try < ${TRIES:-100}; try++)); do
    torchrun \
        --nnodes "$NODES" --nproc-per-node "$RANKS" --max-restarts 1000 \
        --rdzv-backend c10d --rdzv-endpoint "$STORE:$PORT" --rdzv-id "${RUN:-fsdp2}" \
        --rdzv-conf "$conf" ${ADDRESS:+--local-addr "$ADDRESS"} \
        "$@" && exit 0
    sleep 1
done
exit 1
