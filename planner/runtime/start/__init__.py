"""From a plan file to processes that hold an engine each.

`launch` checks a plan and starts ranks (`workers`, `agent`, `worker`), again after the failures
that `course` says; `apply` joins them: `groups` builds process groups, `device` and `process` set
a process up for its rank.
"""
