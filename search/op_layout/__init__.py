"""Placements of ops inside one block class on one mesh axis.

Comes in: a program of a block class, and prices of its ops and redistributions. Goes out: layouts
that are fastest, or leanest, with what is proved of them. Read in this order:

    block_problem    the choice as numbers; `reshard_edges`: what meets at a tensor
    block_prices     what ops and redistributions cost; `block_build` states the problem with them,
                     `segments` without strategies that lead nowhere
    eliminate        solves it exactly, in the order of `ordering`; wide ones
                     `search.ilp.blocks` or, with a bound, `decompose`
    layouts          all of it for a model: `boundaries` has what ties blocks to each other, `front`
                     finds the corners between fast and lean
"""
