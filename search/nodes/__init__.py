"""The nodes of the search: sets of plans, each split into smaller sets (see `branch_and_bound`).

In comes a request's shapes; out come nodes, and evaluated plans. Read in this order:

    sizes               degrees, microbatch sizes and their layouts         bound phase
    configurations      a shape, a configuration, a partitioned one         the three phases
    partitions          the k best partitions of an evaluated configuration
    meshes              mixes of meshes: stages with a dp and tp of their own
    interleaved_meshes  the same with several stages a rank
"""
