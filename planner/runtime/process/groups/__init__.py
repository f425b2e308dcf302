"""Process groups of a plan's ranks, from the first message to the last.

Read `together` first (what all ranks say at once), then `alike` (what must be equal on all nodes),
`process_group`, `mesh` and `gloo_threads`.
"""
