"""An exported graph read into plain ops.

In: what torch.export gives (`record` says how calls are noted). Out: raw ops. `read` goes through
the nodes, `writes` makes in-place writes pure, `sparse` takes sparse tensors that are made dense.
"""
