"""Families of ops, a file each: what their functions compute, and the record that joins them.

    products    a sum over an inner dim: matmul, convolution, attention, embedding, linear algebra
    entries     entry by entry, or along a dim: arithmetic, activations, reductions, norms, creation
    shapes      the same entries elsewhere: views, parts, indexing
    losses      of classes, of samples and of entries
    images      pooling and resizing
    lowered     what lowering puts into a program: collectives and casts

Importing this package imports every module in it and in its folders, and so registers all records.
"""

from importlib import import_module
from pkgutil import walk_packages

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)
