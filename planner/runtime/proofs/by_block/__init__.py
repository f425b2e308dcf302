"""Proof of a plan that is too large for the machine at hand, from its parts.

Nothing is trained. In the order of `prove`: the job table and its messages (`tables`), wiring of
blocks and stages in numbers of elements (`wires`), coverage of parameters and optimizer shards
(`coverage`), values on their way between blocks (`hand_over`), each block class under each of its
layouts (`blocks`) on ranks that `simulate` runs in one process, and the order of collectives over
the step (`step_order`). `cut` says what is cut down for that, `facts` what blocks compute whole;
`report` holds what was found, and `limits` what it does not show.
"""
