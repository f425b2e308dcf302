"""Workers that answer at once with made-up, repeatable times, for tests of everything else."""

import time
import zlib
from typing import get_args

from profiles.measure.workers import ProbeFailed
from profiles.records import HostWork, ZeroWork


class FakeWorkers:
    """Takes the place of `profiles.measure.workers.WorkerGroup`. `devices` has a name per rank, and
    an op takes `pause_s`. `hosts` has the node of each rank; messages of `slow_host` take 20 times
    as long.
    """

    devices = ("test device", "test device")
    pause_s = 0.0
    hosts = ("host", "host")
    slow_host = ""
    refuses = staticmethod(lambda task: False)

    def __init__(self, launcher):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def call(self, task, *, timeout_s):
        if self.refuses(task):
            raise ProbeFailed("group can't be formed: no route to host")
        ranks = zip(self.devices, self.hosts, strict=True)
        return [self._answer(task, at, *rank) for at, rank in enumerate(ranks)]

    def _answer(self, task, rank, device, host):
        match task["task"]:
            case "describe":
                return {
                    "device": device,
                    "memory_bytes": 2**31,
                    "shares_memory": True,
                    "driver": "none",
                    "torch": "2.13",
                    "node": host,
                    "float8": False,
                    "blocks": False,
                }
            case "memory":
                return {"context_bytes": 1e8, "allocator_overheads": [0.05, 0.07]}
            case "overlap":
                return {"compute": 1.1, "communication": 1.2}
            case "op":
                time.sleep(self.pause_s)
                slower = 2.0 if device == "slow device" else 1.0
                each = slower * (1e-5 + zlib.crc32(str(task["probe"]).encode()) / 2**32 * 1e-4)
                names = ("forward", "backward", "forward_warm", "backward_warm")
                return {"product": [1e-4], "light": [2e-4], **{name: [each] * 3 for name in names}}
            case "zero":
                own_s = 1e-5 * task["num_tensors"] + 1e-10 * task["numel"]
                paces = {"product": [1e-4], "light": [2e-4]}
                return {**paces, **{work: [own_s] * 3 for work in get_args(ZeroWork)}}
            case "waits":
                return [(1e-3, 2e-4, 1e-4), (2e-3, 3e-4, 1e-4)]
            case "host":
                return {kind: [2e-5] * 3 for kind in get_args(HostWork)}
            case "sustained":
                return {"short": [1e-3], "sustained": [1.1e-3]}
            case "launch":
                return {"seconds": [5e-6] * 3}
            case "collective":
                (*group,) = (r for ranks in task["groups"] if rank in ranks for r in ranks)
                slower = 20 if self.slow_host in {self.hosts[member] for member in group} else 1
                return {"seconds": [slower * (1e-5 + task["num_bytes"] / 1e9)] * 3}
            case "step":
                seconds = 1e-6 * task["num_tensors"] + 1e-9 * task["numel"]
                return {"seconds": [seconds] * 3, "product": [1e-4], "light": [2e-4]}
