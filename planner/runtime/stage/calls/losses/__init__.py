"""Losses that an op of the library does not compute."""
