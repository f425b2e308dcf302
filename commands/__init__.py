"""The commands of `planner`, a file each; `cli.py` makes them the app.

What comes in: the parsed command line. A command loads the files that its arguments name, calls a
function of a room (`search`, `costmodel`, `profiles`, `planner`), saves what it made and prints
it. What goes out: files, text on stdout, notes and progress on stderr, an exit code if it is not 0.

Read `common/options.py` first (arguments that several commands take), then `common/question.py`
(what `search` and `why` share) and `common/models.py` (what a model is read from, by `doors/`),
then any command. `render/` turns results into text.

Rooms are imported inside the commands, so that `planner --help` answers at once and
`planner show` never loads torch.
"""
