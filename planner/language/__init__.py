"""What a model, a layout, a schedule and a plan are, as plain data. Free of torch.

In: what a capture found, or what a file holds. Out: graphs, plans, and the program, job table and
pieces of tensors of each rank that follow from them. The cost model prices these objects, the
search compares them and the runtime runs them. Read in the order of the layers, each of which
imports only those before it: `graph` (the captured model) and `schedule` (tables of jobs), `layout`
(where tensors lie), `ops` (what is known of each op), `plan` (decisions), `across` (what a model
computes across samples), `lowering` (what a plan makes of a graph on a rank), then `templates`
(graphs made of sizes alone) and `stacks` (which plans other training systems express).
"""
