"""Values that a script reads of a training which runs on other ranks, or has not run yet.

`outputs` and `pending` stand for what a module returns until a step has made it, `snapshots` for
state dicts.
"""
