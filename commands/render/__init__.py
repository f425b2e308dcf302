"""What commands show: results of the rooms in, text for people out.

`answer` is what a search answers on one screen, with `pipeline` (a step in characters) and `words`
(a plan in sentences); `html/` is a plan's report. `console` prints (results on stdout, progress and
notes on stderr) and writes traces; `plan`, `profile`, `search`, `run` (simulated and recorded) and
`checks` (dry runs, `verify`) make tables of what a room returned; `flags` spells the fields that a
message names as flags; `error_report` writes the file that an unexpected error is reported with.
"""
