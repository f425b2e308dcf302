"""What users hold in their hands, as a model file: configurations and scripts of other systems.

In: the file that a command was given in place of a .py file: a Hugging Face config.json or its
folder, a Megatron-LM script or list of flags, a torchtitan configuration in toml. Out: an ordinary
model file with random weights and tokens, kept in the cache, which every command and every rank
reads as it reads a user's own; and what the file says of the run (`Opened`). What is trained (the
model, its batch, precision, clipping, devices and runtime) is taken over; how its own run lays the
work out is taken over with ``--keep-layout`` alone, as that is what is searched.

Read `opening` first (which reader a file goes to); each reader is a module of its own.
"""

from commands.doors.opened import Asked, Opened
from commands.doors.opening import open_model

__all__ = ["Asked", "Opened", "open_model"]
