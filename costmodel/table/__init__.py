"""Runs described by a row of numbers, such as published tables, priced without a graph.

In: a row (`rows`). Out: step time and memory (`published`, `run_exchange`, `run_memory`), from a
transformer's kernels (`transformer`, `kernels`, `fusion`) and a device's fitted rates.
"""
