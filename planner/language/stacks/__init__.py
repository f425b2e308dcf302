"""Training systems that plans are written for: what each can express, declared once.

In: a stack's name, or that of an execution. Out: what it expresses of a plan. Both the emitters
(`planner.emit`) and a search for one of its executions read the same declaration, so what is found
for a stack can be written for it. Read `stack` (the record), `known` (the systems), `layered` and
`transformer_graph` (a model as they see it), `tensor_parallel`, `narrow_layers` (what it has in 8
bits), `rules` (why a choice is not expressed), `expressed` (the same for a search). Torch-free.
"""

from planner.language.stacks import known  # noqa: F401  (registers the stacks)
from planner.language.stacks.expressed import Expressed, expressed_of
from planner.language.stacks.layered import LayeredModel
from planner.language.stacks.stack import (
    STACKS,
    Stack,
    TensorParallel,
    execution_of,
    register_stack,
    stack_named,
    stack_names,
    stack_of,
)

__all__ = [
    "STACKS",
    "Expressed",
    "LayeredModel",
    "Stack",
    "TensorParallel",
    "execution_of",
    "expressed_of",
    "register_stack",
    "stack_named",
    "stack_names",
    "stack_of",
]
