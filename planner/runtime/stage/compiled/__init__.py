"""Blocks whose program is compiled: a forward and a backward graph, each one call of fused kernels.

Comes in: the local program of a block class. Goes out: a `Run` like the eager one, whose forward
saves what the eager one saves, so that recomputation, offloads, ZeRO, W jobs and the memory model
take it as it is (docs/decisions/0037-compiled-blocks.md). Read `trace` (a program as one graph of
forward and backward), `halves` (cut in two by what is saved), `pieces` (a backward cut at its
collectives, where a plan makes weight gradients beside them), `kernels` (through the compiler),
`graphs` (these in CUDA graphs, where a plan has them), `block` (what a stage calls) and `sizes`
(of microbatches, each of which has blocks of its own).
"""
