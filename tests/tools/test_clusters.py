"""What starts a training on a cluster: scripts and manifests as far as they run without one."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.run import get_args_parser

import harness
from harness import distributed

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: about its own pages", allow_module_level=True)

from example_runs import EXAMPLES, TIMEOUT_S, environment, free_port
from fsdp2.checkpoint import Checkpointer
from pages import ROOT, blocks, commands, is_quoted

CLUSTERS = EXAMPLES / "clusters"
PAGE = ROOT / "docs" / "guides" / "clusters.md"
# Commands that need what is not on one machine; what they name is read by other tests here.
NOT_RUN = {
    "sbatch examples/clusters/slurm.sbatch": "no Slurm: the script runs with stand-ins",
    "kubectl apply -f examples/clusters/jobset.yaml": "no cluster: the manifest is read",
    "python examples/clusters/ray_train.py": "no Ray: what a worker runs is run on two ranks",
}


def torchrun_options(arguments: list[str]) -> Any:
    """As torchrun itself reads them; the script has to be there."""
    options = get_args_parser().parse_args(arguments)
    assert (ROOT / options.training_script).is_file()
    return options


def stand_in(folder: Path, name: str, does: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{does}\n")
    path.chmod(0o755)


def run_script(path: Path, *arguments: str, cwd: Path = ROOT, **variables: str) -> str:
    done = subprocess.run(
        ["bash", str(path), *arguments],
        env=environment(**variables), cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["nodes.sh", "slurm.sbatch"])
def test_scripts_have_no_errors_of_syntax(name: str) -> None:
    subprocess.run(["bash", "-n", str(CLUSTERS / name)], check=True)


def test_the_script_for_nodes_asks_for_the_head_and_passes_all_on(tmp_path: Path) -> None:
    stand_in(tmp_path, "torchrun", 'printf "%s\\n" "$@"')
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    printed = run_script(
        CLUSTERS / "nodes.sh", "examples/minimal.py", "two words",
        PATH=path, HEAD="node0", NODES="4", RANKS="8",
    )  # fmt: skip
    options = torchrun_options(printed.splitlines())
    assert (options.nnodes, options.nproc_per_node) == ("4", "8")
    assert (options.rdzv_backend, options.rdzv_endpoint) == ("c10d", "node0:29500")
    assert options.training_script_args == ["two words"]
    without = subprocess.run(
        ["bash", str(CLUSTERS / "nodes.sh")], env={"PATH": path}, capture_output=True, text=True
    )
    assert without.returncode != 0
    assert "set HEAD" in without.stderr


@pytest.mark.long
def test_two_nodes_on_one_machine_train_together(tmp_path: Path) -> None:
    """As the page says: the same command twice."""
    stand_in(tmp_path, "torchrun", f'exec {sys.executable} -m torch.distributed.run "$@"')
    variables = environment(
        HEAD="127.0.0.1", PORT=str(free_port()), NODES="2", RANKS="1",
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    )  # fmt: skip
    command = ["bash", str(CLUSTERS / "nodes.sh"), str(EXAMPLES / "minimal.py")]
    nodes = [
        subprocess.Popen(
            command, env=variables, cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        printed = [node.communicate(timeout=TIMEOUT_S)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], printed
    assert sum("saved and loaded" in each for each in printed) == 1, "two worlds of one rank?"
    assert Checkpointer(tmp_path / "minimal-checkpoints").steps() == [20]


@pytest.mark.parametrize("left", ["nothing", "a save that was cut", "a checkpoint"])
def test_a_slurm_job_starts_torchrun_on_every_node(left: str, tmp_path: Path) -> None:
    resumed = left == "a checkpoint"
    stand_in(
        tmp_path, "scontrol", '[ "$*" = "show hostnames node[3-6]" ] && printf "node3\\nnode4\\n"'
    )
    stand_in(tmp_path, "srun", 'printf "%s\\n" "$@"')
    root = tmp_path / "out" / "checkpoints"
    if left == "a save that was cut":
        (root / ".step-000001.0-1.tmp" / ".fsdp2").mkdir(parents=True)
    elif resumed:
        root.mkdir(parents=True)
        Checkpointer(root).save(1, model=torch.nn.Linear(2, 2))
    printed = run_script(
        CLUSTERS / "slurm.sbatch", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        SLURM_JOB_NODELIST="node[3-6]", SLURM_JOB_ID="1234567", SLURM_JOB_NUM_NODES="4",
        SLURM_GPUS_ON_NODE="8", OUT=str(tmp_path / "out"),
    ).splitlines()  # fmt: skip
    assert printed[:2] == ["--kill-on-bad-exit=1", "torchrun"]
    options = torchrun_options(printed[2:])
    assert (options.nnodes, options.nproc_per_node) == ("4", "8")
    assert options.rdzv_endpoint == "node3:24567"
    assert ("--resume" in options.training_script_args) == resumed
    source = (EXAMPLES / "common" / "options.py").read_text()
    for word in options.training_script_args:
        assert not word.startswith("--") or f'"{word}"' in source, word


def test_the_manifest_is_one_of_jobset_whose_pods_find_each_other() -> None:
    yaml = pytest.importorskip("yaml")
    manifest = yaml.safe_load((CLUSTERS / "jobset.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["torchrun"]
    options = torchrun_options(container["args"])
    assert int(options.nnodes) == spec["parallelism"] == spec["completions"]
    assert int(options.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    name = manifest["metadata"]["name"]
    host, _, port = options.rdzv_endpoint.partition(":")
    assert host == f"{name}-{job['name']}-0-0.{name}"
    assert int(port) == container["ports"][0]["containerPort"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


@distributed(2)
def test_what_a_worker_of_ray_runs() -> None:
    """Ray itself is not there: its names are, as far as a worker uses them."""
    reports: list[dict[str, Any]] = []
    module = ray_script(reports)
    with harness.shared_folder() as folder:
        settings = {"steps": 10, "checkpoints": f"{folder}/checkpoints"}
        module.train_on_worker(settings)
        assert [report["step"] for report in reports] == [10]
        module.train_on_worker({**settings, "steps": 20})  # as after a failure
    assert [report["step"] for report in reports] == [10, 20]
    assert reports[-1]["loss"] < reports[0]["loss"]


def ray_script(reports: list[dict[str, Any]]) -> ModuleType:
    """The script, imported with stand-ins for Ray."""
    context = SimpleNamespace(get_world_rank=dist.get_rank)
    names = {
        "ray.train.torch": {"get_device": lambda: torch.device("cpu"), "TorchTrainer": None},
        "ray.train": {
            "get_context": lambda: context, "report": reports.append, "FailureConfig": None,
            "RunConfig": None, "ScalingConfig": None,
        },
        "ray": {},
    }  # fmt: skip
    modules = {name: ModuleType(name) for name in names}
    for name, members in names.items():
        vars(modules[name]).update(members)
    modules["ray.train"].torch = modules["ray.train.torch"]  # type: ignore[attr-defined]
    modules["ray"].train = modules["ray.train"]  # type: ignore[attr-defined]
    sys.modules.update(modules)
    try:
        specification = importlib.util.spec_from_file_location(
            "ray_train", CLUSTERS / "ray_train.py"
        )
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
    finally:
        for name in modules:
            del sys.modules[name]
    return module


def test_code_on_the_page_is_that_of_the_scripts() -> None:
    for block in blocks(PAGE):
        if block.language != "sh":
            assert is_quoted(block, PAGE), f"in no file that the page links to:\n{block.code}"


def test_commands_on_the_page_start_these_scripts() -> None:
    for command in commands(PAGE):
        if command in NOT_RUN:
            continue
        words = [word for word in shlex.split(command) if "=" not in word]
        assert words[:2] == ["bash", "examples/clusters/nodes.sh"], command
        assert (ROOT / words[2]).is_file()
    assert set(NOT_RUN) <= set(commands(PAGE))
