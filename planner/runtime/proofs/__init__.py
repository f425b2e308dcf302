"""Proofs and pictures of a run: none of this runs in plain training.

`verify` compares a plan's training with one process (`one_process`, `promote`, `fixed_draws`),
`dryrun` runs one rank on fake tensors, `recorder` writes timelines, `watchdog` tells of hangs.
"""
