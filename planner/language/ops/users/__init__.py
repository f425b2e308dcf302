"""Sharding rules of a user's own ops, given in a line: `planner.register_rule`.

    @torch.library.custom_op("mine::gated", mutates_args=())
    def gated(x: Tensor, w: Tensor, bias: Tensor) -> Tensor: ...

    planner.register_rule(gated, "...d, df, +f -> ...f")

In: an op and a text of letters (`equation`), or a function that returns one. Out: the record of an
op family (`planner.language.ops.record`) like any other (`rules`). A rule may stand in the model
file: ranks and checks execute that file, and a capture that is kept on disk names the ops whose
rules it needs, so that the file is executed again where they are not there
(`planner.capture.source.capture_cache`).
"""

from planner.language.ops.users.equation import GivenTensor
from planner.language.ops.users.rules import (
    has_user_rule,
    register_rule,
    rule_digests,
    unregister_rule,
)

__all__ = ["GivenTensor", "has_user_rule", "register_rule", "rule_digests", "unregister_rule"]
