"""Configurations of runs that people have, as a row that is priced.

In: the files that configure a run (a Megatron-LM script or flags, a torchtitan .toml, a nanotron
.yaml, a DeepSpeed json, a Hugging Face config.json, a table of columns in toml) and what else is
known of it. Out: a row of docs/estimate-rows.md (`DescribedRun`), which `planner check` and
`planner calibrate` price alike. A file says a part of the row; a later kind of file in
`describing.CONFIGURATIONS` says it over an earlier one.

Read `described` first, then `describing` (which reader a file goes to), then `folder` (a run's
files by what they are).
"""

from commands.doors.runs.described import DescribedRun
from commands.doors.runs.describing import describe, is_configuration

__all__ = ["DescribedRun", "describe", "is_configuration"]
