"""What a rank holds between steps: weights, gradients, the optimizer, on device or host.

Read `weights` first, then `outside`, `tied`, `masters`, `zero` (FSDP2; its gathers in 8
bits: `narrow_gather`) and `optimizers`; `gather` brings state together again; `untouched` and
`away` guard the user's module.
"""
