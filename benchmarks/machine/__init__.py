"""The runtime, its memory, profiles and families of models, measured on this machine's CPUs.

In come small models (`layers`, `gpt`); out come times and bytes, beside what was predicted or what
other libraries take. `plan_runs` runs many plans of a model in turns, as `planner launch` does, for
`predict_cpu` and `chosen_plan`.
"""
