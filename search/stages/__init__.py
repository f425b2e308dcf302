"""What runs of consecutive blocks cost as stages of a pipeline, for all runs at once.

`stage_table` has the loads of a layout's blocks, `rank_stages` adds what replicas and ZeRO cost,
`drafts` makes the tables there are for a tp degree, cp degree and microbatch size.
"""
