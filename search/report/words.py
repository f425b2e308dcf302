"""What the parts of a step and of memory are called, wherever people are told of them."""

from __future__ import annotations

PART_WORDS = {
    "compute_s": "compute",
    "recompute_s": "recomputation",
    "host_s": "kernel launches",
    "tp_comm_s": "tensor parallel messages",
    "dp_comm_s": "data parallel messages",
    "optimizer_s": "optimizer",
    "offload_s": "offload to the host",
    "waited_s": "messages between stages",
    "imbalance_s": "imbalance",
    "fill_drain_s": "fill and drain",
    "messages_s": "waiting for messages",
    "inputs_s": "inputs",
    "clipping_s": "gradient clipping",
    # Of plans that were written before causes were told: parts of the rank that ends last.
    "bubble_s": "waiting for other stages",
    "pp_comm_s": "messages between stages",
}

PART_MEANING = {
    "compute_s": "forward and backward, mean over pipeline ranks",
    "recompute_s": "forward work that runs again in the backward",
    "host_s": "the device waits for the host to launch kernels",
    "tp_comm_s": "collectives inside blocks, over tp, cp, hp and ep",
    "dp_comm_s": "gradients and weights between replicas, what compute does not hide",
    "optimizer_s": "the update of the weights",
    "offload_s": "copies to and from host memory that outlast the jobs beside them",
    "imbalance_s": "the busiest pipeline rank works longer than the mean",
    "fill_drain_s": "that rank has no microbatch to work on: start and end of the step",
    "messages_s": "messages between stages that no job hides",
    "inputs_s": "the batch is copied to the first stage",
    "clipping_s": "the norm of all gradients, and waiting for the last rank",
}

MEMORY_WORDS = {
    "parameter_bytes": "weights",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "activation_bytes": "activations",
    "transient_bytes": "running job",
    "communication_bytes": "receive buffers",
    "batch_bytes": "batch",
    "allocator_bytes": "allocator",
    "context_bytes": "context",
}
"""Parts of a device's memory; they add up to its total."""
