"""What commands show: results of the rooms in, text for people out.

`console` prints (results on stdout, progress and notes on stderr) and writes traces; `plans/` has
plans and answers of searches, `html/` is a plan's report; `profile`, `run` (simulated, recorded),
`checks` (dry runs, `verify`), `preflight`, `doctor` and `goodput` make tables of what a room
returned; `flags` spells the fields that a message names as flags; `error_report` writes the file
that an unexpected error is reported with.
"""
