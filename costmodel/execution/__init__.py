"""How runtimes execute plans, as data: a JSON record each in `data/`.

A plan says what is split and in which order; an `Execution` says what a runtime makes of it: which
kernels it fuses, what it overlaps with what, how many ops its host issues, how wide its sums of
gradients are. In: a name. Out: a record of constants, each with its source. `docs/contributing.md`
says how to add one. Read `execution` for what a record holds; `dispatch` has what brings rows to
experts, a record each as well.
"""

from costmodel.execution.execution import Execution, execution_names, find_execution

__all__ = ["Execution", "execution_names", "find_execution"]
