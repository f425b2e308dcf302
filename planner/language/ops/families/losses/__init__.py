"""Losses: terms of a sum or mean over samples. `targets` first: how a mean of shards is whole."""
