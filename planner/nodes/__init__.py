"""Several nodes: who started this process, where all meet, how long to wait, which link is slow.

Read `launchers` first, then `meeting` and `waiting`; `node_links` is for what measures links,
`check` is the record of what a check found (`planner.doctor`, `planner.runtime.preflight`).
"""
