"""Bytes of one program: what each op allocates, saves for its backward and frees.

Read `storage` (which tensors share memory), `saved` and `kept_rules` (what backward needs), then
`liveness` (a program's highest point) and `backward_walk` (the same of its backward).
"""
