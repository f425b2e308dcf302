"""Stage boundaries: a chain of blocks cut into stages under a memory limit.

In: a `ChainProblem`. Out: the cut of least bound (`chain_dp`; `bisect` is fast and not exact), the
k best partitions (`k_best`), and the even cut of interleaved stages (`balance`, `interleaved`).
"""
