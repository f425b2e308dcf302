"""The nodes of the search: sets of plans, each split into smaller sets (see `branch_and_bound`).

In comes a request's shapes; out come nodes, and evaluated plans. Read in this order:

    sizes            degrees, microbatch sizes and their layouts         bound phase
    configurations   a shape, a configuration                            the three phases
    partitions       the best partition, then the k best; `exact_recompute`: how much a stage
                     recomputes where the bound let too little pass; `lean_plan`: the plan of
                     the least memory, and one to show where much does not fit
    replicas_on_groups   plans whose stages have replicas on several groups of devices;
                     `pipelines_on_groups`: their stage boundaries, of one stage or more

Those of stages with meshes of their own are in `search.meshes`.
"""
