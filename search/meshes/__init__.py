"""Plans whose stages have meshes, or lie on groups of devices, of their own.

Read `mix` (which meshes stages choose from), `mixed_stages` (the chain problem of such stages),
`mix_node` and `interleaved_mixes` (their nodes, with one stage a rank and with several), `roots`
(which mixes there are).
"""
