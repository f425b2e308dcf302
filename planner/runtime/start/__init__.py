"""From a plan file to processes that hold an engine each.

`launch` checks a plan and starts ranks (`workers`, `agent`, `worker`), again after the failures
that `course` says; `apply` joins them: `mesh` builds process groups, `device`, `cores`, `heap` and
`gloo_threads` set a process up for its rank.
"""
