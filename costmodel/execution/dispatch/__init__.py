"""How experts' rows travel: the dispatchers there are, what an exchange takes, how uneven it is.

In: a rank's program with its exchanges of rows (`planner.language.lowering.experts`), where its
ranks lie, a `Dispatcher`. Out: seconds of the exchanges that show, and bytes of their buffers. Read
in order: `dispatcher` (the record), `imbalance` (rows of the fullest rank), `exchange` (seconds of
an exchange alone), `beside` (what compute hides of it), `choice` (those that a runtime may take),
`of_plan` (those that a plan's blocks take), `recorded` (how uneven rows of a run were).
"""
