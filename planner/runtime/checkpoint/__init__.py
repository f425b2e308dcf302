"""Checkpoints: a training run on the disk, saved under one plan and loaded under any other.

In: an engine. Out: a folder of files of `torch.distributed.checkpoint`, and the engine again. What
is stored are boxes of whole tensors by the user's names; `pieces` says, without torch, which boxes
a rank holds under a plan, and `parts` which of an engine's tensors have their values. Resharding
is then torch.distributed.checkpoint's own. Read `pieces`, `parts` and `optimizer_state` first
(what is saved), then `storage` and `folder` (how it comes to be on the disk, whole or not at all),
`staging` and `checkpoints` (when: beside the steps that follow).
"""
