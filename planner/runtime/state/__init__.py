"""What a rank holds between steps: weights, gradients, the optimizer, on device or host.

Read `weights` first, then `tied`, `masters`, `zero` (FSDP2), `optimizer` with `reach` (what an
update reads) and `whole_params`, and `host_optimizer`; `gather` brings state together again, and
`untouched` guards the user's module.
"""
