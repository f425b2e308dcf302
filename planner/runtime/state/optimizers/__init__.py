"""The optimizer's step on what a rank holds.

Comes in: a user's optimizer and a rank's parameters. Goes out: parameters updated. Read `reach`
first (what an update reads of a parameter), then `optimizer`, `whole_params` (matrices gathered for
updates that need them whole), `several`, `host_optimizer` and `owned` (what a script may not do).
"""
