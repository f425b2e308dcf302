"""A stack of equal layers is exported in part: what an export costs grows with kinds of layers.

Comes in: a module, and a way to run its forward. Goes out: the graph that exporting all of it
yields. Five steps, each of which gives up where it can't prove that:

- `calls` runs two forwards of all layers, and notes the functions that they call: calls equal to
  earlier ones are not run. Where calls do not show all, `trace` notes the ops of one forward;
- `find` looks for a list of layers whose ops repeat with a period, whatever surrounds them, and
  says how many layers show all there is: what precedes the repetition, and three periods of it;
- the module with that many layers is traced too, and must do the same around and in them;
- this module alone is rehearsed (`planner.capture.checks.on_meta`) and exported, if calls show
  that all layers do the same in both forwards, and nothing beside (`in_part`);
- `expand` puts copies of the middle period into its captured ops, and compares the periods there.

Of a model that repeats nothing, or breaks a rule (a layer that reads what the layer before the
last made, a tie between layers), all is exported, as before.
"""
