"""Which launcher started this process together with others, and where it stands among them.

Every launcher tells its processes by variables of the environment. This module reads all of them,
for whatever needs the answer: `planner launch` and `planner profile` under srun, mpirun or
Kubernetes, and `planner.apply` in a script that any of them started.

Sources: torchrun (`torch.distributed.run`, "Environment Variables"), srun(1) of Slurm ("OUTPUT
ENVIRONMENT VARIABLES"), mpirun(1) of Open MPI ("OMPI_COMM_WORLD_*"), Hydra of MPICH and Intel MPI
(PMI_* and MPI_LOCAL*), Kubeflow's training operator (PyTorchJob: RANK and MASTER_ADDR of a pod,
PET_* with `nprocPerNode`), and Ray Train, which sets torchrun's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.errors import PlannerError

_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
"""Of jobs under Slurm: below the ports that Linux gives to connections of its own (32768 on), and
one of its own for each job and step that run side by side."""
_USUAL_PORT = 29_500
"""That of torchrun, where the launcher tells none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The place of this process among those that a launcher started together.

    Attributes:
        launcher: its name, for messages.
        number: of this process among all, from 0.
        count: all processes, at least 2.
        local_number: of this process among those of its node.
        local_count: of its node; None where the launcher does not tell.
        address: the host of process 0.
        port: a port there.
        is_rank: whether this process can only be a rank: the launcher holds what ranks share, and
            starts them again.
    """

    launcher: str
    number: int
    count: int
    local_number: int
    local_count: int | None
    address: str
    port: int
    is_rank: bool

    @property
    def is_node(self) -> bool:
        """Whether it is the only process of its node, so that it can start the node's ranks."""
        return not self.is_rank and self.local_count == 1

    @property
    def meeting(self) -> str:
        """Where all meet, as host:port."""
        return f"{self.address}:{self.port}"

    def torch_variables(self) -> dict[str, str]:
        """Return the variables by which PyTorch knows a rank, this process being one."""
        return {
            "RANK": str(self.number),
            "WORLD_SIZE": str(self.count),
            "LOCAL_RANK": str(self.local_number),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launcher:
    """The variables of one launcher. `needs` must all be set for it to be this one.

    Attributes:
        name: for messages.
        number: the variable of a process's number.
        count: that of how many there are.
        local_number: that of its number on its node; None where a node has one process.
        local_count: how many its node has, from the environment.
        address: the host of process 0, from the environment; None where it isn't told.
        port: a port there, from the environment.
        is_rank: see `Started`.
        needs: further variables that only this launcher sets.
    """

    name: str
    number: str
    count: str
    local_number: str | None
    local_count: Callable[[Mapping[str, str]], int | None]
    address: Callable[[Mapping[str, str]], str | None]
    port: Callable[[Mapping[str, str]], int] = lambda environment: _USUAL_PORT
    is_rank: bool = False
    needs: tuple[str, ...] = ()


def _told(name: str) -> Callable[[Mapping[str, str]], int | None]:
    """A number that a variable has, if it is set."""
    return lambda environment: _number(environment, name) if name in environment else None


def _on_one_node(local_count: str, count: str) -> Callable[[Mapping[str, str]], str | None]:
    """The address of process 0 where all are on this node."""

    def address(environment: Mapping[str, str]) -> str | None:
        here = environment.get(local_count)
        return "localhost" if here is not None and here == environment.get(count) else None

    return address


def _first_host(environment: Mapping[str, str]) -> str | None:
    """The first of Slurm's list of hosts: ``a[03-05,9]-ib,b1`` begins with ``a03-ib``."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    hosts = next((environment[name] for name in names if environment.get(name)), None)
    if hosts is None:
        return None
    whole = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    return None if whole is None else re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", whole.group())


def _slurm_local_count(environment: Mapping[str, str]) -> int | None:
    """The most processes of any node, of a list such as ``2(x3),1``."""
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts = next((environment[name] for name in names if environment.get(name)), "")
    found = [int(count) for count in re.findall(r"(?:^|,)(\d+)", counts)]
    return max(found) if found else None


def _slurm_port(environment: Mapping[str, str]) -> int:
    """A port that other jobs and steps on these nodes do not take."""
    job, step = (_number(environment, name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _FIRST_PORT + (job * 10 + step) % _NUM_PORTS


def _master(environment: Mapping[str, str]) -> str | None:
    return (
        environment.get("PET_MASTER_ADDR") or environment.get("PET_RDZV_ENDPOINT", "").split(":")[0]
    )


_LAUNCHERS = (
    _Launcher(
        name="torchrun",
        number="RANK",
        count="WORLD_SIZE",
        local_number="LOCAL_RANK",
        local_count=_told("LOCAL_WORLD_SIZE"),
        address=lambda environment: None,
        is_rank=True,
    ),
    _Launcher(
        name="a PyTorchJob",
        number="PET_NODE_RANK",
        count="PET_NNODES",
        local_number=None,
        local_count=lambda environment: 1,
        address=_master,
        port=lambda environment: _told("PET_MASTER_PORT")(environment) or _USUAL_PORT,
    ),
    _Launcher(
        name="a PyTorchJob",
        number="RANK",
        count="WORLD_SIZE",
        local_number=None,
        local_count=lambda environment: 1,
        address=lambda environment: None,
    ),
    _Launcher(
        name="srun",
        number="SLURM_PROCID",
        count="SLURM_STEP_NUM_TASKS",
        local_number="SLURM_LOCALID",
        local_count=_slurm_local_count,
        address=_first_host,
        port=_slurm_port,
        # A batch script has the variables of its job and is a single process; a step has both.
        needs=("SLURM_STEP_ID", "SLURM_JOB_ID"),
    ),
    _Launcher(
        name="mpirun",
        number="OMPI_COMM_WORLD_RANK",
        count="OMPI_COMM_WORLD_SIZE",
        local_number="OMPI_COMM_WORLD_LOCAL_RANK",
        local_count=_told("OMPI_COMM_WORLD_LOCAL_SIZE"),
        address=_on_one_node("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ),
    _Launcher(
        name="mpirun",
        number="PMI_RANK",
        count="PMI_SIZE",
        local_number="MPI_LOCALRANKID",
        local_count=_told("MPI_LOCALNRANKS"),
        address=_on_one_node("MPI_LOCALNRANKS", "PMI_SIZE"),
    ),
)
"""In the order in which they are looked for: torchrun may be started by any of the others."""


def started(environment: Mapping[str, str]) -> Started | None:
    """Return the place that a launcher gave this process; None when it is alone.

    MASTER_ADDR and MASTER_PORT, where they are set, say where process 0 can be met. Raises
    PlannerError when the place is no place, or nothing says where to meet.
    """
    for launcher in _LAUNCHERS:
        names = (launcher.number, launcher.count, *launcher.needs)
        names += () if launcher.local_number is None else (launcher.local_number,)
        if not all(environment.get(name) for name in names):
            continue
        number, count = (_number(environment, name) for name in names[:2])
        if count < 2:
            return None
        if number >= count:
            raise PlannerError(
                f"{launcher.number}={number} and {launcher.count}={count} were given; processes "
                f"count from 0 to {count - 1}; start all by one launcher"
            )
        local = launcher.local_number
        return Started(
            launcher=launcher.name,
            number=number,
            count=count,
            local_number=0 if local is None else _number(environment, local),
            local_count=launcher.local_count(environment),
            address=_address(launcher, environment),
            port=_port(launcher, environment),
            is_rank=launcher.is_rank,
        )
    return None


def _address(launcher: _Launcher, environment: Mapping[str, str]) -> str:
    address = environment.get("MASTER_ADDR") or launcher.address(environment)
    if not address:
        raise PlannerError(
            f"{launcher.number} says that {launcher.name} started this process and "
            f"{environment[launcher.count]} in all, but MASTER_ADDR is not set; set it to the "
            "host of process 0, the same for all (mpirun -x MASTER_ADDR=HOST)"
        )
    return address


def _port(launcher: _Launcher, environment: Mapping[str, str]) -> int:
    port = _told("MASTER_PORT")(environment)
    if port is None and launcher.is_rank:  # the launcher listens somewhere, and did not tell
        raise PlannerError(
            f"{launcher.number} says that {launcher.name} started this process, but MASTER_PORT "
            "is not set; set it to a free port of the host of process 0"
        )
    return launcher.port(environment) if port is None else port


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdecimal()):
        raise PlannerError(f"{name}={text} was given; launchers set it to a whole number from 0 on")
    return int(text)
