"""Numbers of NCCL that a run sets, or that its memory depends on; torch-free."""

MESSAGE_BLOCKS = 8
"""The most thread blocks, one a channel, that a communicator for messages between stages runs on.

A receive that was posted early runs on its blocks until its message comes: on NCCL's default, up to
32 of an H100's 132 multiprocessors for each neighbour, beside the jobs that compute. Eight carry
more than a link between nodes; what an NVLink loses by it has not been measured.
"""

LINE_CHANNELS = 16
"""Channels of a communicator of an axis. Assumed: NCCL takes 2 to 32, by the links that it finds.
"""

CONNECTION_BYTES = 4 * 2**20 + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16
"""Buffers of a connection to one rank, on each channel: of the protocols Simple, LL128 and LL
(DEFAULT_BUFFSIZE, DEFAULT_LL128_BUFFSIZE and DEFAULT_LL_BUFFSIZE in src/init.cc of NCCL 2.18 to
2.27; NCCL_BUFFSIZE, NCCL_LL128_BUFFSIZE and NCCL_LL_BUFFSIZE set others)."""
