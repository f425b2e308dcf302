#!/usr/bin/env bash
# Megatron-LM, written by `planner emit` from plan.json:
# 16 ranks, dp=2 cp=1 tp=2 pp=4 vpp=2, interleaved_1f1b, 32 microbatches of 1, ZeRO 1.
# what else describes the model is left to you: --ffn-hidden-size, --num-query-groups, --normalization, --position-embedding-type, the tokenizer
# Run it in a Megatron-LM checkout: what you give it goes to the training script (data,
# learning rate, the model's other sizes).
set -euo pipefail
# Node 0 is at MASTER_ADDR; every node runs this script with its own NODE_RANK.
: "${MASTER_ADDR:=localhost}" "${MASTER_PORT:=29500}" "${NODE_RANK:=0}"
# One hardware queue keeps collectives in front of the products they overlap with
# (GPUs before Blackwell). Megatron-FSDP refuses it.
export CUDA_DEVICE_MAX_CONNECTIONS=1
FLAGS=(
    --num-layers 32
    --hidden-size 4096
    --num-attention-heads 32
    --seq-length 8192
    --max-position-embeddings 8192
    --untie-embeddings-and-output-weights
    --micro-batch-size 1
    --global-batch-size 64
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 4
    --context-parallel-size 1
    --sequence-parallel
    --pipeline-model-parallel-layout 'Et*4|(t*4|)*6t*4L'
    --overlap-grad-reduce
    --use-distributed-optimizer
    --overlap-param-gather
    --bf16
)
exec torchrun --nnodes 2 --nproc-per-node 8 \
    --node-rank "$NODE_RANK" --rdzv-backend static \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    "${TRAIN:-pretrain_gpt.py}" "${FLAGS[@]}" "$@"
