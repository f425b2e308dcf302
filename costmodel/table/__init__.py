"""Runs described by a row of numbers, such as published tables, priced as plans.

In: a row (`rows`). Out: the model's template, its plan and its execution (`rows.row_plan`), and
what `estimate` says of them. Beside it is what other runtimes' kernels take: `kernels` has a
device's few fitted rates (`benchmarks/published/fit_rates.py` fits them), `fusion` says which ops
are one kernel.
"""
