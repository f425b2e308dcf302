"""A training script without edits, run on the ranks of a plan: `planner launch` with `unmodified`.

In: a script for one process. Out: the same training, by a plan. In the order of reading:

    running.py   runs the script; what of it runs on which rank
    finding.py   finds the model: the module that is called in training, whose parameters an
                 optimizer has
    ranks.py     rank 0 runs the script alone from then on; the others follow its commands
    taken.py     the model and its optimizer after they were taken over: calls, backward, clipping,
                 updates, evaluation, state dicts
    pending.py   tensors that a call of the model returns before their values are there
    outputs.py   what a model returns, and how it is made of what its modules return
    replaced.py  the functions of torch that act on a taken model in another way
    recorded.py  a model file made of a script, for `planner search`

What a loop does is taken over where it is exactly the plan's training, and refused with its line
where it is not.
"""
