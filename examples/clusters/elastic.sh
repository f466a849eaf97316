#!/usr/bin/env bash
# Start an elastic run: run the same command on every host, and on hosts that join later.
#
#     STORE=node9 NODES=1:2 RANKS=8 bash examples/clusters/elastic.sh \
#         examples/train_lm.py --elastic --out /shared/lm --save-every 100
#
# STORE  host of the store; run python examples/clusters/store.py there
# PORT   its port
# NODES  minimum and maximum number of hosts
# RANKS  processes per host: the number of its GPUs
# ADDRESS  address at which other hosts reach this one (default: its name)
# TRIES  how often to restart torchrun if it fails
set -uo pipefail

: "${STORE:?set STORE to the name or address of the host of the store}"
PORT="${PORT:-29500}"
NODES="${NODES:-1:2}"
RANKS="${RANKS:-8}"

# A host without a sign of life for 3 times 2 seconds is gone. A round starts 3 seconds after the
# minimum number of hosts has come, with the hosts that are there.
conf="is_host=false,keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=3,read_timeout=20"

# Each round needs its own store on the host of rank 0. torch would keep the store of the first
# round. When rank 0 moves to another host, the hosts would wait for each other at two stores.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-10}"

# torchrun restarts the processes; the loop restarts torchrun (for example, if the store was gone).
for ((try = 0; try < ${TRIES:-100}; try++)); do
    torchrun \
        --nnodes "$NODES" --nproc-per-node "$RANKS" --max-restarts 1000 \
        --rdzv-backend c10d --rdzv-endpoint "$STORE:$PORT" --rdzv-id "${RUN:-fsdp2}" \
        --rdzv-conf "$conf" ${ADDRESS:+--local-addr "$ADDRESS"} \
        "$@" && exit 0
    sleep 1
done
exit 1
