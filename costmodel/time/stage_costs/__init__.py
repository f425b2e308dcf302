"""What a run of consecutive blocks costs as a stage of a pipeline: one place, for all who price.

In: prices of block classes (`costmodel.cache`), the degrees and layouts of a stage, how its ranks
share weights (`planner.language.plan.replication`). Out: seconds and bytes of any runs of blocks,
as arrays. The search prices all runs of a window of the chain at once, the estimate those of a
plan's cut.

Read in this order: `times` (seconds of a run, which add up) and `load` (bytes of a run, which do
not); `chain` lays the prices of classes along the model, with what moves between blocks;
`runs` takes runs out of a chain; `replicas` adds what replicas exchange; `stage_costs` puts all of
it together, and has the jobs of a cut of the whole chain.
"""
