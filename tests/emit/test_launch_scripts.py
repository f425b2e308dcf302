"""X11: scripts for torchrun, Slurm and Ray start the ranks of a plan, which train as one process.

Slurm's and Ray's own programs are stood in for by stubs that set what theirs set; in the quick
form of each test so is torchrun, and the training script writes its environment alone.
"""

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from planner.capture.source.capture_cache import load_graph
from planner.emit import Launch, PlanView, emit, find_emitter, refusals
from planner.emit.targets.kubernetes import KUBERNETES
from planner.emit.targets.kubernetes import job_name as kubernetes_name
from planner.emit.targets.ray import RAY as RAY_EMITTER
from planner.emit.targets.slurm import SLURM
from planner.emit.targets.slurm import job_name as slurm_name
from planner.emit.targets.torchrun import TORCHRUN
from planner.errors import PlanError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import ClusterRef, save_plan
from tests.cli.conftest import MODEL_FILE
from tests.emit.views import assert_golden, changed, view_of
from tests.spawn import free_port

TRAIN = """
import json, os, sys
from pathlib import Path
import torch
import model
import planner

torch.manual_seed(0)
network = model.model()
torch.manual_seed(1)
batch = model.batch(4)
alone = [p.detach().clone().requires_grad_() for p in network.parameters()]
expected = torch.func.functional_call(network, dict(zip(dict(network.named_parameters()), alone)),
                                      (batch,) if torch.is_tensor(batch) else batch)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
engine = planner.apply("plan.json", network, optimizer=optimizer)
found = {
    "loss": engine.step(batch).item(),
    "expected": expected.item(),
    "rank": int(os.environ["RANK"]),
    "node": int(os.environ["GROUP_RANK"]),
    "arguments": sys.argv[1:],
}
Path(f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
"""


QUICK_TRAIN = """
import json, os, sys
from pathlib import Path

found = {
    "loss": 1.0,
    "expected": 1.0,
    "rank": int(os.environ["RANK"]),
    "node": int(os.environ["GROUP_RANK"]),
    "arguments": sys.argv[1:],
}
Path(f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
"""

QUICK_TORCHRUN = """
import argparse, os, subprocess, sys

parser = argparse.ArgumentParser()
for name in ("nnodes", "nproc-per-node", "node-rank", "max_restarts", "master-port"):
    parser.add_argument(f"--{name}", type=int)
parser.add_argument("--rdzv-backend", choices=["static"], required=True)
parser.add_argument("--master-addr", choices=["localhost"], required=True)
parser.add_argument("program", nargs=argparse.REMAINDER)
given = parser.parse_args()
assert given.nnodes * given.nproc_per_node == 2 and given.master_port > 1024
for local in range(given.nproc_per_node):
    rank = given.node_rank * given.nproc_per_node + local
    own = {"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(given.node_rank)}
    subprocess.run([sys.executable, *given.program], env=os.environ | own, check=True)
"""


@pytest.fixture(params=["quick", pytest.param("real", marks=pytest.mark.slow)])
def folder(request, tmp_path, monkeypatch) -> Path:
    """A folder with model.py, train.py, and torchrun and python of this interpreter on the path."""
    quick = request.param == "quick"
    (tmp_path / "model.py").write_text(MODEL_FILE.format(layers=4, width=8, body="pass"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "train.py").write_text(QUICK_TRAIN if quick else TRAIN)
    (tmp_path / "quick_torchrun.py").write_text(QUICK_TORCHRUN)
    tools = tmp_path / "tools"
    tools.mkdir()
    runs = f'#!/bin/sh\nexec "{sys.executable}" '
    program = str(tmp_path / "quick_torchrun.py") if quick else "-m torch.distributed.run"
    stub(tools / "torchrun", f'{runs} {program} "$@"\n')
    stub(tools / "python", runs + '"$@"\n')
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def stub(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def emit_into(folder: Path, name: str, *, devices_per_node: int) -> None:
    plan = default_plan(
        load_graph(folder / "model.py"), pp=2, microbatch_size=2, num_microbatches=2
    )
    cluster = ClusterRef(name="none", device="cpu", devices_per_node=devices_per_node)
    plan = plan.model_copy(update={"cluster": cluster})
    save_plan(plan, folder / "plan.json")
    for file, text in emit(PlanView(plan=plan), find_emitter(name)).files.items():
        (folder / file).write_text(text)


def run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def assert_trained(folder: Path, *, nodes: tuple[int, int]) -> None:
    for rank, node in enumerate(nodes):
        found = json.loads((folder / f"rank-{rank}.json").read_text())
        assert (found["rank"], found["node"], found["arguments"]) == (rank, node, ["--lr", "1 2"])
        assert found["loss"] == pytest.approx(found["expected"], rel=1e-5)


def test_torchrun_script_trains_on_two_ranks(folder):
    emit_into(folder, "torchrun", devices_per_node=2)
    script = (folder / "torchrun.sh").read_text().replace("29500", str(free_port()))
    (folder / "torchrun.sh").write_text(script)
    run(folder, "bash", "torchrun.sh", "--lr", "1 2")
    assert_trained(folder, nodes=(0, 0))


def test_slurm_script_trains_on_two_nodes(folder):
    emit_into(folder, "slurm", devices_per_node=1)
    tools = folder / "tools"
    stub(
        tools / "scontrol", '#!/bin/sh\necho "$*" > scontrol.said\nprintf "localhost\\nother\\n"\n'
    )
    stub(
        tools / "srun",
        textwrap.dedent(
            """\
            #!/usr/bin/env bash
            while [[ "$1" == --* ]]; do shift; done
            for node in 0 1; do SLURM_NODEID=$node SLURM_PROCID=$node "$@" & pids+=($!); done
            for pid in "${pids[@]}"; do wait "$pid" || exit 1; done
            """
        ),
    )
    port = free_port()
    stub(
        tools / "sbatch",
        textwrap.dedent(
            f"""\
            #!/usr/bin/env bash
            export SLURM_JOB_ID={port - 20000} SLURM_JOB_NODELIST='node[0-1]'
            export SLURM_SUBMIT_DIR="$PWD" SLURM_PROCID=0 SLURM_NODEID=0
            cp "$1" /tmp/$$.spool; shift
            trap 'rm -f /tmp/$$.spool' EXIT
            cd / && bash /tmp/$$.spool "$@"
            """
        ),
    )
    run(folder, "sbatch", "slurm.sbatch", "--lr", "1 2")
    assert_trained(folder, nodes=(0, 1))
    assert (folder / "scontrol.said").read_text() == "show hostnames node[0-1]\n"


RAY = """
import threading


class Ref:
    def __init__(self, function, arguments):
        self.thread = threading.Thread(target=self.run, args=(function, arguments))
        self.thread.start()

    def run(self, function, arguments):
        try:
            self.value, self.error = function(*arguments), None
        except Exception as error:
            self.error = error


class Remote:
    def __init__(self, function):
        self.function = function

    def options(self, *, scheduling_strategy, num_cpus, num_gpus, max_retries):
        assert 0 <= scheduling_strategy.index < 2 and max_retries == 0
        return self

    def remote(self, *arguments):
        return Ref(self.function, arguments)


def init(address=None):
    pass


remote = Remote


def get(refs):
    if isinstance(refs, list):
        return [get(ref) for ref in refs]
    refs.thread.join()
    if refs.error:
        raise refs.error
    return refs.value
"""

RAY_UTIL = {
    "__init__": 'def get_node_ip_address():\n    return "localhost"\n',
    "placement_group": """
from ray import Ref

class Group:
    def ready(self):
        return Ref(lambda: self, ())

def placement_group(bundles, strategy):
    assert strategy == "STRICT_SPREAD" and bundles == [{"CPU": 1.0}] * 2
    return Group()

def remove_placement_group(group):
    open("removed", "w").close()
""",
    "scheduling_strategies": """
class PlacementGroupSchedulingStrategy:
    def __init__(self, group, placement_group_bundle_index):
        self.index = placement_group_bundle_index
""",
}


def test_ray_driver_trains_on_two_nodes(folder, monkeypatch):
    emit_into(folder, "ray", devices_per_node=1)
    stubs = folder / "stubs"
    (stubs / "ray" / "util").mkdir(parents=True)
    (stubs / "ray" / "__init__.py").write_text(RAY)
    for name, text in RAY_UTIL.items():
        (stubs / "ray" / "util" / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{stubs}{os.pathsep}{os.environ['PYTHONPATH']}")
    run(folder, sys.executable, "ray_driver.py", "--lr", "1 2")
    assert_trained(folder, nodes=(0, 1))
    assert (folder / "removed").exists()


def test_a_node_that_lacks_something_says_so_before_it_waits(folder):
    emit_into(folder, "torchrun", devices_per_node=2)
    (folder / "train.py").unlink()
    done = subprocess.run(
        ["bash", "torchrun.sh"], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "no file train.py" in done.stderr


@pytest.mark.parametrize("name", ["torchrun", "slurm", "ray", "kubernetes"])
def test_golden_files_of_two_nodes_of_gpus(name):
    launch = Launch(script="train it.py", arguments=("--steps", "10"))
    view = view_of(launch=launch)
    assert_golden(emit(view, find_emitter(name)).files, name)
    if name != "kubernetes":
        for file, text in emit(view, find_emitter(name)).files.items():
            if not file.endswith(".py"):
                subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_plans_with_experts_meshes_start_as_others():
    assert not refusals(view_of(model="mixtral-8x7b", ep=2), find_emitter("torchrun"))


def test_kubernetes_manifest_has_documented_fields():
    yaml = pytest.importorskip("yaml")
    text = emit(view_of(), find_emitter("kubernetes")).files["kubernetes.yaml"]
    config, service, job = yaml.safe_load_all(text)
    script = emit(view_of(), find_emitter("torchrun")).files["torchrun.sh"]
    assert config["data"] == {"torchrun.sh": script}
    name = job["metadata"]["name"]
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert set(job["spec"]) == {
        "completionMode", "completions", "parallelism", "backoffLimit", "template",
    }  # fmt: skip
    assert (job["spec"]["completionMode"], job["spec"]["completions"]) == ("Indexed", 2)
    pod = job["spec"]["template"]["spec"]
    assert set(pod) == {"subdomain", "restartPolicy", "containers", "volumes"}
    assert pod["subdomain"] == service["metadata"]["name"] == name
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    environment = {entry["name"]: entry for entry in container["env"]}
    assert environment["MASTER_ADDR"]["value"] == f"{name}-0.{name}"
    field = environment["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert field == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert {volume["name"] for volume in pod["volumes"]} == {
        mount["name"] for mount in container["volumeMounts"]
    }


def on_nodes_of(per_node: int, **cells):
    view = view_of(**cells)
    cluster = view.plan.cluster.model_copy(update={"devices_per_node": per_node})
    return changed(view, cluster=cluster)


@pytest.mark.parametrize(("per_node", "nodes", "ranks"), [(4, 4, 4), (8, 2, 8), (16, 1, 16)])
def test_every_script_starts_the_ranks_of_a_node_on_each(per_node, nodes, ranks):
    view = on_nodes_of(per_node)
    start = f"torchrun --nnodes {nodes} --nproc-per-node {ranks} "
    script = emit(view, TORCHRUN).files["torchrun.sh"]
    assert start in script
    # Nodes that start again alone would wait for the others.
    assert ("--max_restarts" in script) == (nodes == 1)
    slurm = emit(view, SLURM).files
    assert slurm["torchrun.sh"] == script
    assert f"#SBATCH --nodes={nodes}\n#SBATCH --ntasks-per-node=1\n" in slurm["slurm.sbatch"]
    assert f"#SBATCH --gpus-per-node={ranks}\n" in slurm["slurm.sbatch"]
    ray = emit(view, RAY_EMITTER).files
    assert ray["torchrun.sh"] == script
    assert nodes_of_ray(ray["ray_driver.py"]) == [("", ranks)] * nodes
    job = emit(view, KUBERNETES).files["kubernetes.yaml"]
    assert f"completions: {nodes}\n  parallelism: {nodes}\n" in job
    assert f"limits: {{nvidia.com/gpu: {ranks}}}" in job
    assert start in job


def test_scripts_for_processors_claim_no_gpus():
    view = view_of(launch=Launch(device="cpu"))
    for emitter in (TORCHRUN, SLURM, RAY_EMITTER, KUBERNETES):
        text = "".join(emit(view, emitter).files.values())
        assert "PLANNER_DEVICE=cpu" in text
        assert not re.search(r"nvidia|gpus-per-node|NCCL_DEBUG", text)
    assert set(nodes_of_ray(emit(view, RAY_EMITTER).files["ray_driver.py"])) == {("", 0)}


def nodes_of_ray(driver: str) -> list[tuple[str, int]]:
    """What a driver's NODES evaluate to."""
    (made,) = [node for node in ast.parse(driver).body if isinstance(node, ast.Assign)]
    return eval(ast.unparse(made.value))


@pytest.mark.parametrize(
    ("model", "slurm", "kubernetes"),
    [
        ("my_model.GPT (v2)", "my-model-GPT-v2", "planner-my-model-gpt-v2"),
        ("--x", "x", "planner-x"),
        ("модель", "run", "planner"),
        # 50 letters, and no dash at the end: "planner-" and 42 others, of which the last is one.
        ("a" * 41 + "-b", "a" * 41 + "-b", "planner-" + "a" * 41),
    ],
)
def test_a_job_has_a_name_that_its_cluster_takes(model, slurm, kubernetes):
    assert slurm_name(model) == slurm
    assert kubernetes_name(model) == kubernetes


def on_unlike_nodes(*groups: str, nodes=(("old", 4, 2), ("new", 8, 1))) -> PlanView:
    """A plan of 16 ranks and as many stages as groups are given, on nodes of 4 and of 8."""
    view = view_of(pp=len(groups), tp=2, dp=8 // len(groups), vpp=1)
    stages = tuple(
        stage.model_copy(update={"device_group": group})
        for stage, group in zip(view.plan.stages, groups, strict=True)
    )
    cluster = view.plan.cluster.model_copy(update={"devices_per_node": 4, "nodes": nodes})
    return changed(view, stages=stages, cluster=cluster)


def test_nodes_follow_each_other_as_ranks_do():
    def runs(view):
        return [(run.group, run.ranks, run.nodes) for run in view.node_runs]

    assert runs(on_unlike_nodes("old", "new")) == [("old", 4, 2), ("new", 8, 1)]
    assert runs(on_unlike_nodes("new", "old")) == [("new", 8, 1), ("old", 4, 2)]
    assert runs(on_unlike_nodes("new", "new", "old", "old")) == [("new", 8, 1), ("old", 4, 2)]
    assert runs(on_unlike_nodes("old+new")) == [("old", 4, 2), ("new", 8, 1)]
    halves = (("old", 4, 2), ("new", 2, 4))
    assert runs(on_unlike_nodes("old+new", "old+new", nodes=halves)) == [
        ("old", 4, 1), ("new", 2, 2), ("old", 4, 1), ("new", 2, 2),
    ]  # fmt: skip
    with pytest.raises(PlanError, match="parts of nodes of 'new' in turn with other groups"):
        runs(on_unlike_nodes("old+new", "old+new"))


def test_a_slurm_job_of_unlike_nodes_has_components():
    files = emit(on_unlike_nodes("new", "old"), SLURM).files
    script = files["slurm.sbatch"]
    first, second = script.split("#SBATCH hetjob")
    assert {"#SBATCH --nodes=1", "#SBATCH --gpus-per-node=8"} <= set(first.splitlines())
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=4"} <= set(second.splitlines())
    assert "#SBATCH --output=" in first  # of the component that runs the script
    assert "srun --het-group=0-1 " in second
    assert "NODE_RANK=$SLURM_PROCID" in second
    assert '"$SLURM_JOB_NODELIST_HET_GROUP_0"' in second
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_a_ray_driver_takes_nodes_of_the_groups_that_ranks_lie_on():
    emitted = emit(on_unlike_nodes("new", "old"), RAY_EMITTER)
    assert nodes_of_ray(emitted.files["ray_driver.py"]) == [("new", 8), ("old", 4), ("old", 4)]
    assert any("ray start --resources='{\"new\": 1}'" in note for note in emitted.notes)


def test_nodes_of_equal_size_and_unlike_devices_are_told_apart():
    """A job of three nodes of any kind would put stages on devices that they were not cut for."""
    view = on_unlike_nodes("new", "old", nodes=(("old", 4, 2), ("new", 4, 2)))
    script = emit(view, SLURM).files["slurm.sbatch"]
    assert script.count("#SBATCH --nodes=2") == 2
    assert (
        script.index("# Nodes of new")
        < script.index("#SBATCH hetjob")
        < script.index("# Nodes of old")
    )


def test_a_run_of_unlike_pods_is_a_job_for_each_kind():
    yaml = pytest.importorskip("yaml")
    text = emit(on_unlike_nodes("new", "old"), KUBERNETES).files["kubernetes.yaml"]
    _, service, *jobs = yaml.safe_load_all(text)
    assert [job["spec"]["completions"] for job in jobs] == [1, 2]
    assert len({job["metadata"]["name"] for job in jobs}) == 2
    containers = []
    for job in jobs:
        template = job["spec"]["template"]
        assert template["metadata"]["labels"].items() >= service["spec"]["selector"].items()
        containers += template["spec"]["containers"]
    assert [c["resources"]["limits"]["nvidia.com/gpu"] for c in containers] == [8, 4]
    masters = [
        entry["value"] for c in containers for entry in c["env"] if entry["name"] == "MASTER_ADDR"
    ]
    assert masters == [f"{jobs[0]['metadata']['name']}-0.{service['metadata']['name']}"] * 2
    # Pods of the second Job count on from the first's.
    command = containers[1]["command"][2].replace("exec bash /planner/torchrun.sh", "env")
    told = subprocess.run(
        ["bash", "-c", command],
        capture_output=True, text=True, env={**os.environ, "NODE_RANK": "1"}, check=True,
    ).stdout  # fmt: skip
    assert "NODE_RANK=2" in told.splitlines()


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_nodes_start_as_many_ranks_as_their_kind_has(tmp_path, real):
    """Nodes of 1 and of 2 ranks, whose numbers torchrun adds up to ranks 0, 1 and 2."""
    view = on_unlike_nodes("small", "large", nodes=(("small", 1, 1), ("large", 2, 1)))
    (tmp_path / "plan.json").touch()
    (tmp_path / "train.py").write_text(QUICK_TRAIN)
    (tmp_path / "quick.py").write_text(QUICK_UNEQUAL)
    launch = Launch(plan_file="plan.json", script="train.py", device="cpu")
    view = PlanView(plan=view.plan, graph=view.graph, launch=launch)
    (tmp_path / "torchrun.sh").write_text(emit(view, TORCHRUN).files["torchrun.sh"])
    environment = {**os.environ, "MASTER_PORT": str(free_port())}
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    program = "-m torch.distributed.run" if real else str(tmp_path / "quick.py")
    (bin_ / "torchrun").write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    (bin_ / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for name in ("torchrun", "python"):
        (bin_ / name).chmod(0o755)
    environment["PATH"] = f"{bin_}:{environment['PATH']}"
    nodes = [
        subprocess.Popen(
            ["bash", "torchrun.sh"], cwd=tmp_path, env={**environment, "NODE_RANK": str(node)}
        )
        for node in (0, 1)
    ]
    assert [node.wait(timeout=120) for node in nodes] == [0, 0]
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(3)]
    assert [each["node"] for each in found] == [0, 1, 1]


QUICK_UNEQUAL = """
import argparse, os, subprocess, sys

parser = argparse.ArgumentParser()
for name in ("nproc-per-node", "node-rank"):
    parser.add_argument(f"--{name}", type=int)
known, words = parser.parse_known_args()
first = [0, 1][known.node_rank]
script = words[words.index("train.py"):]
for rank in range(first, first + known.nproc_per_node):
    env = {**os.environ, "RANK": str(rank), "GROUP_RANK": str(known.node_rank)}
    subprocess.run([sys.executable, *script], env=env, check=True)
"""
