"""Plans for people: `answer` is what a search answers on one screen, with `pipeline` (a step in
characters) and `words` (a plan in sentences); `plan` shows a plan file, `search` fronts, remedies
and comparisons, `what_if` other machines, `diff` two plans.
"""
