"""A job table made for stages as they are: uneven, with transfers, under a memory limit.

In: a `Pipeline` (seconds and bytes of its stages). Out: a `Schedule`. `list_scheduler` builds
tables by a rule, `improve` moves jobs that lie on the critical path, `synthesize` keeps the best.
"""
