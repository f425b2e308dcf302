"""Capture: an unmodified nn.Module and two example batches → ModelGraph.

The module is exported on the meta device (`export`) at two batch sizes, of a stack of equal layers
a few only, which show all of them (`repeats`); each export is read into plain ops (`read`, with in-
place writes made pure by `writes`). Aligning the two (`align`) gives every size and every integer
argument as an affine function of the microbatch size, without symbolic shapes and their guards; an
alignment that fails names the op and the user's line (`diagnose`). Another precision than the
model's own is another capture, of the cast model (`precision`). In the merged list of ops attention
is told of its masks where they are recognised (`masks`); it is then cut into a preamble and a chain
of blocks (`planner.capture.blocks`).
"""

from planner.capture.module import (
    batch_from_spec,
    build_source,
    build_without_values,
    capture_module,
    capture_source,
)
from planner.capture.source.model_file import ModelSource, load_model_file

__all__ = [
    "ModelSource",
    "batch_from_spec",
    "build_source",
    "build_without_values",
    "capture_module",
    "capture_source",
    "load_model_file",
]
