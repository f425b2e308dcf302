#!/usr/bin/env bash
# A node of torchtitan, written by `planner emit` from plan.json:
# 8 ranks, dp=2 cp=1 tp=2 pp=2 vpp=2, interleaved_1f1b, 4 microbatches of 1, ZeRO 3.
set -euo pipefail
# Node 0 is at MASTER_ADDR; every node runs this script with its own NODE_RANK.
: "${MASTER_ADDR:=localhost}" "${MASTER_PORT:=29500}" "${NODE_RANK:=0}"
export PYTHONPATH="$(cd "$(dirname "$0")" && pwd):${PYTHONPATH:-}"
exec torchrun --nnodes 1 --nproc-per-node 8 \
    --node-rank "$NODE_RANK" --rdzv-backend static \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    -m torchtitan.train --module planned --config planned "$@"
