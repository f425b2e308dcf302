"""What both training scripts share: the text, one device's step, and the log."""

import json
import os
import resource
import sys
import sysconfig
import time
from pathlib import Path

import torch
from rich.progress import Progress

RANK = int(os.environ.get("RANK", "0"))
TEXT_BYTES = 4_000_000


def standard_library_text():
    """The first bytes of Python's own .py files, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for file in sorted(folder.glob("*.py")) + sorted(folder.glob("[!_lst]*/*.py")):
        text += file.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8)


def batches(steps, batch_size, sequence):
    """Yield (tokens, targets) of random stretches of the text, the same on every rank."""
    text = standard_library_text()
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(text) - sequence, (batch_size, 1), generator=generator)
        stretch = text[starts + torch.arange(sequence + 1)].long()
        yield stretch[:, :-1], stretch[:, 1:]


def train_step(network, optimizer, batch):
    """One step on one device."""
    optimizer.zero_grad()
    loss = network(*batch)
    loss.backward()
    optimizer.step()
    return loss


class Log:
    """Rank 0 shows progress; every rank writes its step times, losses and peak memory.

    The file is train-rank<RANK>.json in the current folder.
    """

    def __init__(self, steps):
        self.step_s = []
        self.losses = []
        self.progress = Progress(disable=RANK != 0)
        self.task = self.progress.add_task("training", total=steps)
        self.progress.start()
        self.last = time.perf_counter()

    def __call__(self, loss):
        self.losses.append(loss.item())
        now = time.perf_counter()
        self.step_s.append(now - self.last)
        self.last = now
        self.progress.advance(self.task)
        if RANK == 0 and len(self.step_s) % 5 == 1:
            self.progress.console.print(
                f"step {len(self.step_s):3}  loss {self.losses[-1]:.4f}  "
                f"{self.step_s[-1] * 1e3:6.1f} ms"
            )

    def close(self):
        self.progress.stop()
        record = {"step_s": self.step_s, "loss": self.losses, "peak_bytes": peak_bytes()}
        Path(f"train-rank{RANK}.json").write_text(json.dumps(record) + "\n")


def peak_bytes():
    """The most memory this process has held: of the GPU if it used one, else resident."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_reserved()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
