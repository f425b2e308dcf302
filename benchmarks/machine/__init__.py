"""Predictions beside what this machine's CPUs take: times, memory, and how far profiles hold.

In comes a small model (`gpt`); out come times and bytes, beside what was predicted. `plan_runs`
runs many plans of a model in turns, as `planner launch` does, for `predict_cpu` and `chosen_plan`.
"""
