"""What a captured graph cannot hold: found and kept as an op, or refused in one line.

In: a user's module and forward. Out: nothing, or a CaptureError that names the line. `hooks` and
`on_meta` refuse constructs, `functions` keeps custom autograd functions, and `rehearsal` (with
`kept_calls`) runs two forwards to find state that one call leaves for the next.
"""
