"""What every test rank needs, imported once by the fork server."""

import contextlib

import torch
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.export
import torch.utils.checkpoint

with contextlib.suppress(ImportError):
    pass

torch.set_num_threads(1)
