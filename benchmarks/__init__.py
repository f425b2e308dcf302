"""Measurements of the project, run by hand: ``python -m benchmarks`` lists them.

In comes what each measures: published runs, searches, this machine. Out come rows (figures by name)
and notes. Read `harness` first, then any benchmark: a function under `@benchmark`, in a file of its
name, in one of the rooms

    published/   the cost model beside runs and kernels that others published (../shared/data)
    searches/    what searches and schedules cost, and how good they are
    machine/     the runtime, its memory, profiles and families of models, on this machine's CPUs

`gpu/` is apart: all that is measured where there is a GPU, by `python -m benchmarks.gpu.run_all`.
"""
