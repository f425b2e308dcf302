"""`planner verify --by-block`: proof of a plan that is too large for the machine at hand.

Nothing is trained. In the order of `prove`: the job table and its messages (`tables`), coverage of
parameters and optimizer shards (`coverage`), wiring of blocks and stages (`wires`, `hand_over`),
each block class under each of its layouts (`blocks`) on ranks simulated in `lockstep`, with
parameters drawn as `windows`, run op by op by `block_run`; and the order of collectives over the
step (`step_order`). `facts` says what is compared with what; `report` what was found.
"""
