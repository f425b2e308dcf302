"""Seconds of a plan's parts.

In: local programs, a profile, a plan. Out: seconds of blocks (`program`), of runs of blocks
(`stage`), of what ranks exchange (`communication`, `boundary`, `tied`) and, played job by job
(`simulate`), of a step. `plan_price` puts a plan's parts together.
"""
