"""Datasets dealt to ranks: what `Engine.loader` gives.

In: a map-style dataset, an iterable or a stream of shards, or a DataLoader that holds one. Out: for
each step the own part of this rank's replica, a position that is saved, and the same part under
any plan. Read `loader` first, then `order` (which samples are in which batch), `streams` (the same
for what can only be read from front to back) and `samples` (what happens to a sample on its way).
"""
