"""Modules that no graph can hold, kept as ops that run the user's own forward.

A forward whose course depends on values (a loop over the experts that were chosen, rows that are
picked by a condition) has no one list of ops. Where a capture fails by that, the innermost module
in whose forward it failed, and all others of its class, become one op each,
``planner::opaque_module``. At training time the op calls the module as it is
(`planner.runtime.stage.calls.opaque_modules`), on whole tensors on every tp and cp rank. Where no
module below the model itself is left, it is the innermost function that the model's forward, or
its loss, called with tensors and numbers (`planner.capture.opaque.functions`).

In: a capture's error (`OpaqueModules.add_from`), then its forwards (`as_ops`). Out: what an op
has to hold of each call (`ModuleCall`). `modules` puts ops in the place of calls; `trial` runs a
module on random values to find what a call makes and costs (`cost`), and `samples` which of its
inputs hold samples that it treats apart.
"""

from planner.capture.opaque.modules import OpaqueModules
from planner.capture.opaque.trial import ModuleCall, Place

__all__ = ["ModuleCall", "OpaqueModules", "Place"]
