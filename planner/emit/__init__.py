"""Plans written for other programs: training systems' own configuration, and launch scripts.

In: a plan, and its model's graph where cuts, placements or dtypes must be read. Out: files of text,
and notes on what they leave open. Nothing is approximated in silence: `features` lists what a plan
can use, an `Emitter` states how it expresses each of them, and what it can't is refused by name
before a file is written: that follows from the declaration of its system
(`planner.language.stacks`, `declared`). Read `features`, `emitter`, `view` (what emitters ask of a
plan and of its model's graph), then `targets`, a file each. `start` has the parts of
scripts. Of hand-written flags of Megatron-LM: `megatron_flags` is the table of options,
`megatron_options` reads a line, `megatron_rules` holds it to what Megatron-LM takes,
`megatron_refusals` names what is not priced, and `megatron_row` makes the row that is priced.
Torch-free.
"""

from planner.emit import targets  # noqa: F401  (each module registers its emitters)
from planner.emit.emitter import (
    EMITTERS,
    Emitted,
    Emitter,
    Refusal,
    Rule,
    emit,
    find_emitter,
    refusals,
    register_emitter,
)
from planner.emit.view import Launch, PlanView

__all__ = [
    "EMITTERS",
    "Emitted",
    "Emitter",
    "Launch",
    "PlanView",
    "Refusal",
    "Rule",
    "emit",
    "find_emitter",
    "refusals",
    "register_emitter",
]
