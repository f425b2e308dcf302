"""Tensors between stages.

Comes in: a graph and a plan. Goes out: which stage sends what to which (`wiring`), between which
ranks and pieces (`routes`), and the messages themselves (`p2p`).
"""
