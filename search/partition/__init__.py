"""Stage boundaries: a chain of blocks cut into stages under a memory limit.

Comes in: a `ChainProblem` (least seconds and bytes of blocks, what the schedule states of its order
of jobs). Goes out: the cut of least bound. Read in this order:

    chain_problem   the problem and its answer; `chain_windows`: which runs a stage may hold
    chain_paths     the path, a chain of jobs that no run of the schedule is shorter than
    chain_dp        minimises the longest path exactly; `chain_reach` narrows where stages may start
    solvers         `chain_dp`, `ilp.joint` or bisection (fast, not exact) by name
    k_best          lists the next best cuts; `least_recompute`: what their stages recompute
    interleaved     cuts for ranks of several stages, evenly (`balance`), with what they recompute
                    (`interleaved_levels`) and a bound of their step
    quick_step      simulates a cut without making a plan
"""
