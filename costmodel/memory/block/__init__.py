"""One block on one rank: what its program holds while it runs forward and backward.

In: a local program and what its ops save (`costmodel.memory.saved`). Out: `block_bytes`: what the
block keeps between forward and backward, how high it rises in each, and what it does at its edges.

Reading order:

    saved tensors -> `recomputed`        what the block keeps between forward and backward
                  -> `forward_walk`      height of the forward, and of its second run
                  -> `backward_facts` -> `backward_walk` (with `gradients`: the buffers they share)
                                      -> `deferred_weights`: gradients made in a job of their own
                                      -> `waiting_weights`: and beside a collective of the block
                  -> `fused_facts`       the same of a compiled block, kernel by kernel
                  -> `graph_bytes`       what its halves take and give as CUDA graphs
    all of these  -> `block_bytes`       the block, also as the bound adds it up
                  -> `placed_block`      as a stage takes it, with `copies` of its inputs
"""
