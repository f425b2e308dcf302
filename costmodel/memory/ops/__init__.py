"""What one op allocates and saves for its backward.

What single ops save and hold stands in the records of `planner.ops`. In: a program of one rank.
Out: its storages (`storage`: which tensors share memory), what its backward needs, once by storage
(`saved`), and what kernels hold only while they run (`kernel_scratch`).
"""
