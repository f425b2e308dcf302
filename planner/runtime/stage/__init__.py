"""One stage of a plan as an nn.Module: its blocks' local programs and what they call.

Read `stage` first, then `programs` and `program_fx` (programs as FX graphs), `collectives` and
`resharding` (redistribution with the right gradient), `recompute`, `weight_grads` and
`host_activations` (what is kept from forward to backward), `local_ops` and `own_random`.
"""
