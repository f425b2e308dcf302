"""Cuts for ranks that hold several stages each: `interleaved_bound` says what no cut is below,
`interleaved` cuts evenly, `interleaved_levels` chooses what blocks recompute.
"""
