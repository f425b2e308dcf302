"""One stage of a plan as an nn.Module: its blocks' local programs and what they call.

Read `stage` first, then `programs` and `program_fx` (programs as FX graphs), `calls/` (what they
call beside PyTorch's own ops), `compiled/` (the same through a compiler), `recompute`,
`weight_grads` and `host_activations` (what is kept from forward to backward),
`beside_collectives` (what a backward makes while it communicates).
"""
