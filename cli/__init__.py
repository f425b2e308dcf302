"""The `planner` command: parse, load files, call one function of a room, save, print.

Commands are grouped by what they do: `measure` (profile), `find` (search, why), `predict`
(show, estimate, simulate, dryrun), `train` (verify, launch, timeline, compare). What `search`
and `why` both ask stands once, in `question`.

Every import of a room is made inside its command, so that `planner --help` answers at once
and `planner show` never loads torch. Results go to stdout; progress, notes and errors to
stderr. Exit codes: 0 done, 1 a check failed (`verify`, `profile --check`), 2 bad input, said
in one line; 3 a mistake of ours, in one line that says where its traceback was written; 130
interrupted, 141 when nobody reads the output any more.
"""

from cli.app import main, run

__all__ = ["main", "run"]
