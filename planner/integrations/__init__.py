"""Training loops that people have, run by a plan.

    prepare.py      a loop of forward, backward and `optimizer.step()`, as accelerate has it
    huggingface.py  `transformers.Trainer`
    script/         a script for one process, without edits

A plan trains a batch as a whole: what a loop does between the forward and the optimizer's step is
part of `Engine.step`. So a loop that does something else there is refused, not approximated.
"""
