"""One block on one rank: what its program holds while it runs forward and backward.

In: a local program and what its ops save (`costmodel.memory.ops`). Out: `block_bytes`: what the
block keeps between forward and backward, how high it rises in each, and what it does at its edges.

Reading order: `block_bytes`, `forward_walk`, `backward_facts` and `backward_walk` (op by op, with
`gradients` for the buffers that gradients share), `recomputed` (activation checkpointing) and
`deferred_weights` (weight gradients made in a job of their own).
"""
