"""What the programs of a stage call beside PyTorch's own ops, each with its gradient.

`collectives` (redistribution with the right gradient), `exchanged_rows` (rows that lie on other
ranks), `rows` (rows taken by number), `attention_tiles` and `attention_kernels` (attention told of
its mask), `narrow` (products of 8-bit floats), `own_random` (draws that a rank can repeat),
`local_ops` (ops whose arguments depend on the rank), `autograd_functions` and `opaque_modules`
(code of the user's that runs as it is).
"""
