"""What follows from a graph and a plan for each rank: its programs, tensors and jobs.

In: a `ModelGraph`, a `Plan`, or layouts that are not a plan yet. Out: local programs with explicit
redistributions, which pieces of which tensors a rank holds, what stages send each other. Read
`lowering` first (a block's program on one rank), then `propagate` and `beam` (placements without a
solver), `experts` (programs whose experts lie apart), `wiring` (values between stages), `pieces`
(boxes of whole tensors), `captured_ops` (which job runs which op), `defaults` (plans without a
search) and `match_model` (whether a plan is of this model).
"""
