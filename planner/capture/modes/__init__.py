"""Torch modes under which a model is looked at: no part of a plan, and used by captures and proofs.

`precision` runs ops in two dtypes, `fixed_draws` gives random ops the same numbers anywhere, and
`ledger` counts the bytes that are alive.
"""
