"""Bytes of one program: what each op allocates, saves for its backward and frees.

What single ops save and hold stands in the records of `planner.ops`. Read `storage` (which tensors
share memory) and `saved` (what the backward of a program needs), then `liveness` (a program's
highest point) and `backward_walk` (the same of its backward).
"""
