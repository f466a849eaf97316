"""What starts a training on a cluster: scripts and manifests as far as they run without one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
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
from fsdp2.cli.main import _make_parser
from pages import ROOT, blocks, commands, is_quoted

CLUSTERS = EXAMPLES / "clusters"
PAGE = ROOT / "docs" / "guides" / "clusters.md"
# Commands that need what is not on one machine; what they name is read by other tests here.
NOT_RUN = {
    "sbatch examples/clusters/slurm.sbatch": "no Slurm: the script runs with stand-ins",
    "kubectl apply -f examples/clusters/jobset.yaml": "no cluster: the manifest is read",
    "python examples/clusters/ray_train.py": "no GPUs: it runs on the CPU, where Ray is installed",
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


# A task for each rank, to which signals go on, as srun does it.
SRUN = """
import os, signal, subprocess, sys
assert sys.argv[1] == "--kill-on-bad-exit=1"
tasks = []
for i in range(int(os.environ["SLURM_NTASKS"])):
    numbers = {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}
    tasks.append(subprocess.Popen(sys.argv[2:], env=os.environ | numbers))
signal.signal(signal.SIGUSR1, lambda number, _: [task.send_signal(number) for task in tasks])
codes = [task.wait() for task in tasks]
sys.exit(max(codes, key=abs))
"""
# A rank that trains nothing: until it is asked to stop, or says of itself how it ends.
RANK = f"""
import os, signal, sys, time
assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN  # until it is handled
sys.path.insert(0, {str(EXAMPLES)!r})
from common.interrupt import stop_requested
folder, rank = sys.argv[sys.argv.index("--out") + 1], os.environ["RANK"]
open(f"{{folder}}/began-{{rank}}", "x").close()
while not stop_requested() and "ALONE" not in os.environ:
    time.sleep(0.01)
if stop_requested():
    open(f"{{folder}}/saved-{{rank}}", "x").close()
sys.exit(int(os.environ["STATUS"]))
"""


class SlurmJob:
    """slurm.sbatch, run with stand-ins for what a cluster has."""

    def __init__(self, folder: Path, python: str, num_ranks: int, **variables: str) -> None:
        self.out, self.requeued = folder / "out", folder / "requeued"
        tools = folder / "tools"
        tools.mkdir()
        self.out.mkdir(exist_ok=True)
        (tools / "srun.py").write_text(SRUN)
        stand_in(tools, "srun", f'exec {sys.executable} {tools / "srun.py"} "$@"')
        stand_in(tools, "python", python)
        scontrol = r"""
            case "$*" in
                "show hostnames node[3-6]") printf "%s\n" 127.0.0.1 node4 node5 node6 ;;
                "requeue 1234567") touch REQUEUED ;;
                *) exit 1 ;;
            esac"""
        stand_in(tools, "scontrol", scontrol.replace("REQUEUED", str(self.requeued)))
        self.variables = environment(
            PATH=f"{tools}{os.pathsep}{os.environ['PATH']}", OUT=str(self.out),
            SLURM_JOB_NODELIST="node[3-6]", SLURM_JOB_ID="1234567",
            SLURM_NTASKS=str(num_ranks), SLURM_NTASKS_PER_NODE=str(num_ranks), **variables,
        )  # fmt: skip

    def run(self, signal_when: Callable[[], bool] | None = None) -> tuple[int, str]:
        """The exit status and what was printed; SIGUSR1 is for the script alone, as with `B:`."""
        process = subprocess.Popen(
            ["bash", str(CLUSTERS / "slurm.sbatch")], env=self.variables, cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while signal_when is not None and not signal_when():
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < deadline
                time.sleep(0.01)
            if signal_when is not None:
                process.send_signal(signal.SIGUSR1)
            printed, _ = process.communicate(timeout=TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, printed


def slurm_settings() -> dict[str, str]:
    lines = (CLUSTERS / "slurm.sbatch").read_text().splitlines()
    words = [line.split()[1] for line in lines if line.startswith("#SBATCH ")]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


@pytest.mark.parametrize("left", ["nothing", "a save that was cut", "a checkpoint"])
def test_a_slurm_job_starts_a_rank_for_every_gpu(left: str, tmp_path: Path) -> None:
    resumed = left == "a checkpoint"
    asked = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    job = SlurmJob(tmp_path, f'echo {" ".join(f"${name}" for name in asked)} "$@"', 3)
    root = job.out / "checkpoints"
    if left == "a save that was cut":
        (root / ".step-000001.0-1.tmp" / ".fsdp2").mkdir(parents=True)
    elif resumed:
        root.mkdir(parents=True)
        Checkpointer(root).save(1, model=torch.nn.Linear(2, 2))
    status, printed = job.run()
    assert status == 0, printed
    ranks = [line.split() for line in sorted(printed.splitlines())]
    numbers = [["127.0.0.1", "24567", str(i), str(i), "3", "3"] for i in range(3)]
    assert [rank[: len(asked)] for rank in ranks] == numbers
    script, *arguments = ranks[0][len(asked) :]
    assert (ROOT / script).is_file()
    assert ("--resume" in arguments) == resumed
    source = (EXAMPLES / "common" / "options.py").read_text()
    for word in arguments:
        assert not word.startswith("--") or f'"{word}"' in source, word
    settings = slurm_settings()
    assert settings["--ntasks-per-node"] == settings["--gpus-per-node"]
    assert not job.requeued.exists()


@pytest.mark.parametrize(
    ("ends", "status"),
    [("when its time is up", 0), ("when its time is up", 3), ("alone", 0), ("alone", 3)],
)
def test_a_slurm_job_saves_before_its_time_is_up_and_is_requeued(
    ends: str, status: int, tmp_path: Path
) -> None:
    """Only if all ranks have saved: a rank that fails would fail again and again."""
    signalled = ends == "when its time is up"
    (tmp_path / "rank.py").write_text(RANK)
    variables = {"STATUS": str(status)} | ({} if signalled else {"ALONE": "1"})
    rank = f'exec {sys.executable} {tmp_path / "rank.py"} "$@"'
    job = SlurmJob(tmp_path, rank, 2, **variables)
    began = [job.out / f"began-{i}" for i in range(2)]
    ended, printed = job.run((lambda: all(p.exists() for p in began)) if signalled else None)
    assert ended == status, printed
    assert len(list(job.out.glob("saved-*"))) == (2 if signalled else 0)
    assert job.requeued.exists() == (signalled and status == 0)
    settings = slurm_settings()
    assert "--requeue" in settings
    assert settings["--signal"].startswith("B:USR1@")
    # What the job prints after it was requeued must not replace what it printed before.
    assert settings["--open-mode"] == "append"


@pytest.mark.long
def test_a_slurm_job_goes_on_where_the_signal_stopped_it(tmp_path: Path) -> None:
    tiny = "--dim 32 --layers 1 --heads 2 --hidden 32 --length 16 --steps 100000"
    text = tmp_path / "text"
    text.write_text("def f(x): return x\n" * 10_000)
    python = f'exec {sys.executable} "$@" {tiny} --data {text}'
    job = SlurmJob(tmp_path, python, 2)
    log = job.out / "losses.jsonl"
    stops = []
    for _ in range(2):
        done = stops[-1] if stops else 0
        status, printed = job.run(
            lambda: log.exists() and log.read_text().count("\n") > done + 3  # noqa: B023
        )
        assert status == 0, printed
        stops.append(Checkpointer(job.out / "checkpoints").steps()[-1])
        assert f"stopped after step {stops[-1]}" in printed
    assert stops[1] > stops[0] + 3
    assert job.requeued.exists()


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


@pytest.mark.long
def test_ray_starts_workers_again_where_one_was_killed(tmp_path: Path) -> None:
    """Ray itself, on this machine."""
    pytest.importorskip("ray.train", reason="no Ray: pip install 'ray[train]'")
    psutil = pytest.importorskip("psutil")
    script = CLUSTERS / "ray_train.py"
    command = [sys.executable, str(script), "--workers", "2", "--cpu", "--shared", str(tmp_path)]
    log = tmp_path / "log"
    with log.open("w") as file:
        job = subprocess.Popen(
            [*command, "--steps", "60"], env=environment(RAY_TRAIN_V2_ENABLED="1"),
            stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    checkpoints = tmp_path / "fsdp2-checkpoints"
    try:
        deadline = time.monotonic() + 240
        while not (checkpoints.exists() and Checkpointer(checkpoints).steps()):
            assert job.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        workers = [
            process for process in psutil.Process(job.pid).children(recursive=True)
            if "RayTrainWorker" in " ".join(process.cmdline())
        ]  # fmt: skip
        assert len(workers) == 2
        workers[1].kill()
        killed_at = Checkpointer(checkpoints).steps()[-1]
        assert job.wait(300) == 0, log.read_text()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert Checkpointer(checkpoints).steps()[-1] == 60 > killed_at
    text = log.read_text()
    assert "step 60: loss" in text
    assert text.count("Started training worker group of size 2") == 2


@pytest.mark.long
def test_the_pods_of_the_manifest_follow_the_schema_of_kubernetes() -> None:
    """JobSet's own fields are read by the test above; what is inside is a Job of Kubernetes."""
    yaml = pytest.importorskip("yaml")
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    manifest = yaml.safe_load((CLUSTERS / "jobset.yaml").read_text())
    for job in manifest["spec"]["replicatedJobs"]:
        as_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}}
        found = {**as_job, "spec": job["template"]["spec"]}
        kubernetes_validate.validate(found, "1.34", strict=True)
        broken = {**found, "spec": {**found["spec"], "paralelism": 4}}
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(broken, "1.34", strict=True)


def test_code_on_the_page_is_that_of_the_scripts() -> None:
    for block in blocks(PAGE):
        if block.language == "text":
            continue  # what the doctor prints: tests/unit/test_doctor_checks.py
        if block.language != "sh":
            assert is_quoted(block, PAGE), f"in no file that the page links to:\n{block.code}"


def test_commands_on_the_page_start_these_scripts() -> None:
    for command in commands(PAGE):
        if command in NOT_RUN:
            continue
        words = [word for word in shlex.split(command) if "=" not in word]
        assert words[:2] == ["bash", "examples/clusters/nodes.sh"], command
        if words[2] == "-m":  # it runs in tests/tools/test_doctor.py
            assert words[3:5] == ["fsdp2", "doctor"]
            assert _make_parser().parse_args(words[4:]).need == 2 * 10**12
            continue
        assert (ROOT / words[2]).is_file()
    assert set(NOT_RUN) <= set(commands(PAGE))
