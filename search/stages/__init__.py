"""Stages that a search may cut a model into, for a mesh of a replica and a microbatch size.

In: layouts of block classes from the layout solver. Out: costs of all runs of blocks, to the chain
solvers. What a run costs is the cost model's (`costmodel.time.stage_costs`). Read `stage_table` (a
layout's runs), `rank_stages` (under replicas and ZeRO, a `chain_problem.Stages`),
`partial_recompute` (runs whose first blocks recompute more), `layout_candidates` (which layouts are
priced at all) and `worth_trying` (which of these tables are kept).
"""
