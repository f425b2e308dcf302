"""Stages that a search may cut a model into, for a mesh of a replica and a microbatch size.

In: layouts of block classes from the layout solver. Out: costs of all runs of blocks, to the chain
solvers (`rank_stages.RankStages`, a `chain_problem.Stages`). What a run costs is the cost model's
(`costmodel.time.stage_costs`). Read `stage_table` (a layout's runs), `run_kinds` (equal runs are
priced once), `rank_stages` (under replicas and ZeRO), `layout_candidates` (which layouts are priced
at all).
"""
