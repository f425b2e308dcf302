"""What ops do across samples where the rules of their family do not say it.

A module has the handlers of a kind of op (`handles` in `planner.language.across.step`); importing
this package registers those of all of them. Handlers of one op are tried in the order in which
they register.
"""

from planner.language.across.handlers import (  # noqa: F401
    buffers,
    gathers,
    losses,
    order,
    rows,
    sums,
    take_and_put,
)
