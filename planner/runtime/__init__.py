"""What runs at training time: a plan's stages, schedule and collectives, and nothing else.

`engine.Engine` is the door (made by `planner.apply`); `launch` starts the processes of a
plan, `verify` proves that a plan computes what one process computes.
"""
