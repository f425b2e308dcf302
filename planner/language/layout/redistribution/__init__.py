"""What brings a tensor from one placement to another.

Comes in: where it lies and where it should. Goes out: collectives on one axis (`redistribute`), or
messages between any two meshes (`reshard`).
"""
