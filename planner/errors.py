"""Errors a user can cause. Each message is one line: what was given, the rule, what to try.

    PlannerError (ValueError)
    ├── ModelError      model.py is missing, lacks model() or batch(), or does not fit its plan
    │   └── CaptureError    the model can't be captured; names the user's source line
    ├── PlanError       a plan file is damaged, too new, or for another model
    ├── LayoutError     degrees, placements or shapes that do not go together
    ├── ScheduleError   an unknown schedule, or a job table that breaks a rule
    └── ProfileError    a profile or cluster description is missing, incomplete or damaged

The command line prints them as one line and exits with code 2. Anything else that
escapes is our own mistake: one line too, exit code 3, the traceback in a file.
"""

from __future__ import annotations


class PlannerError(ValueError):
    """Something the user gave breaks a rule; the message says which and what to try."""


class ModelError(PlannerError):
    """A model file is missing, incomplete, or not the model a plan was made for."""


class CaptureError(ModelError):
    """A model can't be captured as one graph; names the user's source line where known."""


class PlanError(PlannerError):
    """A plan file is damaged, of a newer version, or does not hold together."""


class LayoutError(PlannerError):
    """Parallel degrees, placements or shapes do not go together."""


class ScheduleError(PlannerError):
    """A schedule is unknown, or its job table breaks a rule."""


class ProfileError(PlannerError):
    """A profile or cluster description is missing, incomplete or damaged."""
