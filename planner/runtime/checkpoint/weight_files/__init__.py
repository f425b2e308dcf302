"""Files that other programs wrote, and read: safetensors, state dicts of one process.

Comes in: a path. Goes out: tensors by name, read piece by piece (`sources`), or files of shards
(`safetensors_files`); `single_device` has the optimizer's state as one process keeps it.
"""
