"""How ops treat the samples of a batch: the words that records of families say it in.

In: one op with what is known of its inputs along the samples (`state`). Out: the same of its
outputs, where samples meet, and what makes parts of a batch give what the whole gives (`step`).
Handlers of families are written in these words; `planner.language.across` follows a model with
them.
"""
