"""Lower bounds of a step's time and of a rank's memory, each cheaper than an estimate.

Comes in: a table of block costs and a configuration (degrees, microbatches, schedule, ZeRO). Goes
out: seconds or bytes that no plan of it is below. The search leaves out what a bound rules out, and
what is proved best is so because every bound is below the estimate (`tests/search/test_bounds.py`).
n blocks, S stages; "prunes" names the phase that leaves configurations out by it.

    bound                  of        says                               costs      prunes
    share_of_work          step      some rank does its share           O(1)       shapes
    longest_block          step      a block lies on one rank           O(n)       shapes
    one_microbatch         step      it passes every block in turn      O(1)       shapes
    round_trips            step      ranks wait for later stages        O(1)       configurations
    split_round_trips      step      the same, W jobs fill the waits    O(n)       configurations
    share_of_parameters    memory    some rank holds its share          O(1)       ZeRO stages
    largest_block          memory    a block lies on one rank           O(n)       ZeRO stages

Those are the catalogue; the next need stage boundaries, or more than one table, and stand there:

    least_step_s           step      ops alone, each at its fastest     O(ops)     layouts
      of `LayoutCandidate`
    `possible_starts`      step      where stages may start             O(n)       stage boundaries
    path                   step      the jobs each stage waits for      O(1)       stage boundaries
      of `partition.chain_paths`
    `RankBound.least`      memory    a stage between two jobs           O(1)       stage boundaries
    `least_end_s`          step      interleaved stages, cut evenly     O(S)       configurations

Read in this order: `catalogue` (what a bound is, how one is added, all of them), `least_costs`
(what they are made of), then the mathematics: `round_trips` (linear programs solved by hand),
`exchange` (what replicas exchange at least), `copied_jobs` (jobs beside copies to
the host), `costmodel.memory.bound`.
"""
