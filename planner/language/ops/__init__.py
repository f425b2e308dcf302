"""The catalogue of ops: one record a family says how it is sharded, what it costs, what it saves.

In: one op with its shapes. Out: its strategies on a mesh axis (`registry`), its flop and bytes
(`flops`), whether selective recomputation runs it again (`recompute_choice`), and whether its
weight gradient may be deferred (`weight_products`). All of them read the record of the op's family
(`record`); the memory model and `planner.language.across` read it too. Importing this package
registers every family. It works on the graph alone, free of torch, so a search can run where torch
is not installed.

Read `record` first, then `call` and `kernel` (what the functions of a record are given), `letters`
(most sharding rules in a line), `samples` (what an op does to the samples of a batch) and one of
`families`. `docs/contributing.md` adds a family.
"""

import planner.language.ops.families  # noqa: F401 - registers every family
