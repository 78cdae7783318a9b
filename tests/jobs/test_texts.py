"""Texts of `ultrascale launch`: whole, read by the shell and by the schemas of launchers; and what is refused before that."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from tidy.sources import ROOT

from ultrascale.cli.main import main
from ultrascale.config.resolve import resolve, to_toml
from ultrascale.description.sections.launch import Kubernetes, Launch, SkyPilot, Slurm
from ultrascale.description.units import UnitError, parse_seconds
from ultrascale.jobs import alive, job, state
from ultrascale.jobs.kubernetes import LONGEST_NAME, object_name

RUN = """
name = "big"
cluster = "64xh100"
steps = 20_000
[model]
preset = "llama-3-8b"
[layout]
dp = 64
dp_shard = 32
zero_stage = 2
precision = "bf16"
[batch]
sequence_length = 8192
sequences_per_batch = 512
[data]
sources = ["data/web"]
[launch]
container = "registry.example.com/ultrascale:1"
environment = ["NCCL_DEBUG=INFO", "WORDS=a 'quoted' $text"]
"""
KUBERNETES = "1.34"
EVERY = ("slurm", "kubernetes", "skypilot", "torchrun")
SHELLS = ("slurm", "torchrun")
IN_A_BUCKET = ["--checkpoint.store", "s3://bucket/runs"]


@pytest.fixture(autouse=True)
def there(tmp_path, monkeypatch) -> Path:
    """A folder with a run for 8 nodes of 8 GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


def text(capsys, launcher: str, *words: str, nodes: int = 8) -> str:
    assert main(["launch", launcher, "run.toml", "--nodes", str(nodes), "--print", *words]) == 0
    return capsys.readouterr().out


def refused(capsys, *words: str) -> str:
    assert main(["launch", *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    return told.err


@pytest.mark.parametrize("launcher", EVERY)
def test_a_text_is_whole_and_says_what_it_starts_and_what_the_plan_says(launcher, capsys):
    told = text(capsys, launcher, *IN_A_BUCKET * (launcher == "skypilot"))
    assert not re.search(r"@\{|@@", told) and "# big: 20,000 steps on 8 nodes of 8 GPUs\n" in told
    assert re.search(r"# Planned: [\d.]+ GiB of 79.6 GiB of each device, [\d.]+ s a step, 1d\d\dh for all", told)
    assert "--nproc-per-node 8" in told and "-m ultrascale train run.toml" in told
    assert "NCCL_DEBUG" in told and "INFO" in told and "WARN" not in told  # what is given wins


def test_data_that_this_machine_does_not_have_is_noted(there, capsys):
    words = ["launch", "slurm", "run.toml", "--nodes", "8", "--print"]
    assert main(words) == 0
    assert capsys.readouterr().err == "note: data/web is not on this machine; every node must have it\n"
    (there / "data" / "web").mkdir(parents=True)
    assert main(words) == main([*words, "--data.sources", "s3://bucket/web"]) == 0
    assert capsys.readouterr().err == ""


def test_a_closed_stdout_is_no_error(there):
    with redirect_stdout(None):  # as Python has it then
        assert main(["launch", "slurm", "run.toml", "--nodes", "8", "--print"]) == 0
        assert main(["launch", "slurm", "run.toml", "--nodes", "8"]) == 0
    assert (there / "big.sbatch").exists()


@pytest.mark.parametrize("launcher", SHELLS)
def test_the_shell_reads_its_texts(launcher, capsys):
    told = text(capsys, launcher)
    assert subprocess.run(["bash", "-n"], input=told, text=True, capture_output=True).stderr == ""


def test_the_shell_reads_the_text_for_ssh_and_the_one_inside_it(capsys):
    hosts = ",".join(f"user@h{number}" for number in range(8))
    told = text(capsys, "ssh", "--launch.hosts", hosts)
    inside = told.split("END_OF_NODE_SCRIPT'\n")[1].split("END_OF_NODE_SCRIPT\n")[0]
    for one in (told, inside):
        assert subprocess.run(["bash", "-n"], input=one, text=True, capture_output=True).stderr == ""


def test_a_node_of_several_is_never_taken_for_the_first_one_because_its_number_was_left_out(there, capsys):
    assert main(["launch", "torchrun", "run.toml", "--nodes", "8"]) == 0
    assert "next  bash big.torchrun.sh NUMBER FIRST_HOST   on each of 8 nodes\n" in capsys.readouterr().out
    for words in ([], ["3"]):
        done = subprocess.run(["bash", "big.torchrun.sh", *words], capture_output=True, text=True)
        assert done.returncode != 0 and done.stdout == ""
        assert "is missing: give the number of this node, 0 to 7, and the name of the first node" in done.stderr


def test_variables_reach_the_shell_as_they_were_given(capsys):
    told = text(capsys, "torchrun")
    exported = "\n".join(line for line in told.splitlines() if line.startswith("export ") and "nproc" not in line)
    done = subprocess.run(["bash", "-c", f'{exported}\nprintf %s "$WORDS"'], capture_output=True, text=True)
    assert done.stdout == "a 'quoted' $text"


STAND_IN = """#!/bin/bash
printf '%s\\n' "$@" >>"$(dirname "$0")/asked"
bash -n -c "${!#}" || touch "$(dirname "$0")/unread"
exit 255
"""


def test_nothing_in_the_name_of_a_folder_is_run_here_or_by_the_shell_of_a_host(there, capsys, monkeypatch):
    folder = "/nowhere/a $(touch made) `touch made` 'b\""
    told = text(capsys, "ssh", "--launch.hosts", ",".join(f"h{number}" for number in range(8)), "--folder", folder)
    (there / "ssh").write_text(STAND_IN)
    (there / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{there}:{os.environ['PATH']}")
    done = subprocess.run(["bash"], input=told, text=True, capture_output=True, timeout=60)
    assert done.returncode == 1 and not (there / "made").exists() and not (there / "unread").exists()
    asked = (there / "asked").read_text()
    words = subprocess.run(
        ["bash", "-c", f"printf %s {asked.partition('mkdir -p ')[2].partition(' && ')[0]}"], text=True, capture_output=True
    )
    assert words.stdout == f"{folder}/big/jobs" and not (there / "made").exists()


def test_words_of_sbatch_are_one_word_each(there, capsys, monkeypatch):
    folder = there / "a folder #1"
    folder.mkdir()
    (folder / "run.toml").write_text(RUN)
    monkeypatch.chdir(folder)
    told = text(capsys, "slurm", "--launch.slurm.account", 'lab "x" --wrap=y')
    assert f'#SBATCH --chdir="{there}/a folder #1"\n' in told and '#SBATCH --account="lab \\"x\\" --wrap=y"\n' in told


def test_each_setting_of_slurm_is_in_the_text(capsys):
    told = text(
        capsys, "slurm", "--launch.slurm.partition=gpu", "--launch.slurm.account=lab", "--launch.slurm.qos=high",
        "--launch.slurm.reservation=r1", "--launch.slurm.constraint=ib", "--launch.slurm.options=--switches=1",
        "--launch.time-limit=1d12h", "--launch.network-interface=bond0", "--launch.network-cards=mlx5", "--launch.port=5000",
        "--launch.restarts=7", "--launch.mounts=/data",
    )  # fmt: skip
    wanted = [f"#SBATCH --{one}" for one in ("partition=gpu", "account=lab", "qos=high", "reservation=r1", "constraint=ib",
              "switches=1", "time=1-12:00:00", "exclusive", "mem=0", "requeue", "gres=gpu:8", "nodes=8", "signal=B:USR1@180",
              "open-mode=append", "ntasks-per-node=1")]  # fmt: skip
    assert [one for one in wanted if f"{one}\n" not in told] == []
    wanted = ["NCCL_SOCKET_IFNAME=bond0", "GLOO_SOCKET_IFNAME=bond0", "NCCL_IB_HCA=mlx5", ":5000", "--max-restarts 7",
              "--container-image=registry.example.com/ultrascale:1", ",/data:/data", "--leave-by", "--gpus 8",
              "--numa-binding node", "doctor", "expandable_segments:True"]  # fmt: skip
    assert [one for one in wanted if one not in told] == []


def test_apptainer_and_no_container(capsys):
    with_it = text(capsys, "slurm", "--launch.slurm.container-runtime", "apptainer")
    assert "apptainer exec --nv --bind" in with_it and "--container-image" not in with_it
    assert not re.search("apptainer exec|--container", text(capsys, "slurm", "--launch.container", "none"))


def test_a_job_on_processors_asks_for_no_gpus(capsys):
    words = ["--cluster", "auto", "--device", "cpu", "--launch.gpus-per-node", "8"]
    told = text(capsys, "slurm", *words)
    assert not re.search(r"gres|NCCL_IB|ALLOC_CONF|numa|--gpus", told)


def documents(told: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all(told))


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_kubernetes_text_is_what_the_published_schemas_allow_and_nothing_of_it_is_unknown_to_them(kind, capsys):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed: no schemas")
    kinds = {
        "PersistentVolumeClaim": None, "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob, "JobSet": models.JobsetV1alpha2JobSet,
    }  # fmt: skip
    options = ["--launch.kubernetes.kind", kind, "--launch.kubernetes.queue", "q", "--launch.kubernetes.network", "rdma/hca=8"]
    found = documents(text(capsys, "kubernetes", *options))
    expected = {
        "trainjob": ["PersistentVolumeClaim", "TrainingRuntime", "TrainJob"],
        "jobset": ["PersistentVolumeClaim", "JobSet"],
    }
    assert [one["kind"] for one in found] == expected[kind]
    for one in found:
        model = kinds[one["kind"]]
        if model is not None:
            assert unlike(one, json.loads(model.from_dict(one).to_json())) == []


def test_the_schemas_see_a_planted_mistake(capsys):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed: no schemas")
    one = documents(text(capsys, "kubernetes"))[1]
    job_spec = one["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    job_spec["template"]["spec"]["terminationGraceSeconds"] = 5  # no such key
    assert unlike(one, json.loads(models.TrainerV1alpha1TrainingRuntime.from_dict(one).to_json())) != []
    job_spec["completions"] = "eight"
    with pytest.raises(ValueError):
        models.TrainerV1alpha1TrainingRuntime.from_dict(one)


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_claims_and_the_jobs_within_are_what_kubernetes_own_schemas_allow(kind, capsys):
    published = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed: no schemas")
    options = ["--launch.kubernetes.kind", kind, "--launch.kubernetes.queue", "q", "--launch.kubernetes.network", "rdma/hca=8"]
    claim, *others = documents(text(capsys, "kubernetes", *options))
    jobs = [job for one in others for job in replicated_jobs(one)]
    assert claim["kind"] == "PersistentVolumeClaim" and len(jobs) == 1
    for one in (claim, *jobs):
        published.validate(one, KUBERNETES, strict=True)
    for one, key in ((claim, "accessMode"), (jobs[0], "completion")):
        one["spec"][key] = "ReadWriteMany"  # no such key
        with pytest.raises(published.ValidationError, match=key):
            published.validate(one, KUBERNETES, strict=True)


def replicated_jobs(one: dict[str, Any]) -> list[dict[str, Any]]:
    """The batch jobs that a JobSet, or a TrainingRuntime's, makes."""
    spec = one["spec"].get("template", {}).get("spec", one["spec"]) if one["kind"] == "TrainingRuntime" else one["spec"]
    return [{"apiVersion": "batch/v1", "kind": "Job", **job["template"]} for job in spec.get("replicatedJobs", [])]


def unlike(given: Any, read: Any, at: str = "") -> list[str]:
    """Keys of `given` that a schema did not know, or read as something else."""
    if isinstance(given, dict):
        if not isinstance(read, dict):
            return [at]
        return [bad for key, value in given.items() for bad in unlike(value, read.get(key), f"{at}.{key}")]
    if isinstance(given, list):
        return [bad for number, value in enumerate(given) for bad in unlike(value, read[number], f"{at}[{number}]")]
    return [] if given == read else [f"{at}: {given!r} became {read!r}"]


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_pods_have_shared_memory_a_probe_time_to_leave_and_the_volume(kind, capsys):
    found = documents(text(capsys, "kubernetes", "--launch.kubernetes.kind", kind, "--launch.kubernetes.claim", "mine"))
    spec = found[0]["spec"]["template"]["spec"] if kind == "trainjob" else found[0]["spec"]
    pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] == 180 and container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert container["livenessProbe"]["exec"]["command"] == ["python", "-m", "ultrascale.jobs.alive"]
    assert {one["mountPath"] for one in container["volumeMounts"]} == {"/mnt/run", "/dev/shm"}
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "mine"}
    assert pod["volumes"][1]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    script = as_the_kubelet_reads(container["command"][2], {})
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
    assert {one["name"]: one["value"] for one in container["env"]}["WORDS"] == "a 'quoted' $text"


@pytest.mark.parametrize("name", ["7b", "123", "true", "No", "a" * 64, "A..__--b", "0.-"])
def test_any_name_of_a_run_is_one_that_objects_and_services_of_kubernetes_may_have(name, capsys):
    words = ["--name", name, "--launch.kubernetes.namespace", "123"]
    for one in documents(text(capsys, "kubernetes", *words))[1:]:
        made = one["metadata"]["name"]
        assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", made) and len(made) <= LONGEST_NAME
        assert one["metadata"]["namespace"] == "123"
    (task,) = documents(text(capsys, "skypilot", "--name", name, *IN_A_BUCKET))
    assert task["name"] == made


def test_runs_and_islands_whose_long_names_begin_alike_are_objects_of_their_own():
    names = [f"{'a' * 50}-island-{number}" for number in range(12)]
    assert len({object_name(name) for name in names}) == len(names)


def test_the_kubelet_replaces_nothing_in_a_variable_or_in_the_shell(capsys):
    words = ["--launch.environment", "A=$(B) $$c $d", "--launch.setup", "echo $$; x=$(mktemp /tmp/$$) $(B)"]
    found = documents(text(capsys, "kubernetes", *words))[1]["spec"]["template"]["spec"]
    (container,) = found["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    value = {one["name"]: one["value"] for one in container["env"]}["A"]
    assert as_the_kubelet_reads(value, {"B": "replaced"}) == "$(B) $$c $d"
    script = as_the_kubelet_reads(container["command"][2], {"B": "replaced"})
    assert "\necho $$; x=$(mktemp /tmp/$$) $(B)\n" in script


def as_the_kubelet_reads(text: str, variables: dict[str, str]) -> str:
    """Expansion of $(NAME), known names only, and of $$, as the API describes it for `env.value` and `command`."""

    def read(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", read, text)


IN_A_STORE = [
    *("--launch.kubernetes.volume", "store", "--launch.kubernetes.secret", "keys", *IN_A_BUCKET),
    *("--data.sources", "s3://bucket/data"),
]
ON_ONE_NODE = ["--cluster", "8xh100", "--layout.dp", "8", "--layout.dp-shard", "8"]


@pytest.mark.parametrize("nodes", [1, 8])
@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_a_run_lives_in_a_store_without_a_claim(kind, nodes, capsys):
    words = [*IN_A_STORE, *ON_ONE_NODE * (nodes == 1)]
    found = documents(text(capsys, "kubernetes", "--launch.kubernetes.kind", kind, *words, nodes=nodes))
    assert [one["kind"] for one in found] == [
        "ConfigMap",
        *(["TrainingRuntime", "TrainJob"] if kind == "trainjob" else ["JobSet"]),
    ]
    assert found[0]["data"] == {"run.toml": RUN}
    (job_spec,) = [one for document in found[1:] for one in replicated_jobs(document)]
    pod = job_spec["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    disk, file = pod["volumes"][:2]
    assert disk == {"name": "run", "emptyDir": {}} and file["configMap"] == {"name": found[0]["metadata"]["name"]}
    assert {"name": "file", "mountPath": "/mnt/run/run.toml", "subPath": "run.toml"} in container["volumeMounts"]
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}] and container["workingDir"] == "/mnt/run"
    assert "--checkpoint.store s3://bucket/runs" in container["command"][2] and "claim" not in str(pod)
    published = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed: no schemas")
    for one in (found[0], job_spec):
        published.validate(one, KUBERNETES, strict=True)


SKY = Path(sys.prefix) / "sky" / "bin" / "python"
"""An environment of its own: SkyPilot wants other versions of what is here."""
READ_TASK = "import sys, sky; t = sky.Task.from_yaml(sys.argv[1]); print(t.num_nodes, next(iter(t.resources)).use_spot)"


def test_skypilot_reads_its_task(tmp_path, capsys):
    if not SKY.exists():
        pytest.skip(f"skypilot is not installed in {SKY.parents[1]} (460 MB): its own parser does not read the text here")
    file = tmp_path / "task.yaml"

    def read(told: str) -> subprocess.CompletedProcess[str]:
        file.write_text(told)
        own = os.environ | {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
        return subprocess.run([str(SKY), "-c", READ_TASK, str(file)], env=own, capture_output=True, text=True, check=False)

    told = text(capsys, "skypilot", "--launch.skypilot.infra", "aws", *IN_A_BUCKET)
    done = read(told)
    assert done.stdout.split() == ["8", "True"], done.stderr
    done = read(told.replace("use_spot:", "use_spots:"))  # no such key
    assert done.returncode != 0 and "use_spots" in done.stderr


def test_a_skypilot_task_recovers_spot_machines_and_each_node_sends_its_parts_to_the_store(capsys):
    (task,) = documents(text(capsys, "skypilot", *IN_A_BUCKET))
    resources = task["resources"]
    assert (task["num_nodes"], resources["accelerators"], resources["use_spot"]) == (8, "H100:8", True)
    assert resources["job_recovery"]["strategy"] == "EAGER_NEXT_REGION"
    assert "file_mounts" not in task and ".[train,store]" in task["setup"]
    assert "--checkpoint.store s3://bucket/runs" in task["run"] and "ultrascale.jobs.state out/big" in task["run"]
    (task,) = documents(text(capsys, "skypilot", "--checkpoint.store", "hf://ada/runs"))
    assert ".[train,hub]" in task["setup"] and "--checkpoint.store hf://ada/runs" in task["run"]
    (task,) = documents(text(capsys, "skypilot", *IN_A_BUCKET, "--data.sources", '[{path = "hf://datasets/ada/web"}]'))
    assert ".[train,hub,store]" in task["setup"]


def test_a_skypilot_task_of_one_node_may_keep_runs_in_a_bucket_with_a_disk_before_it(capsys):
    (task,) = documents(text(capsys, "skypilot", "--launch.skypilot.bucket", "s3://mine", *ON_ONE_NODE, nodes=1))
    assert task["file_mounts"] == {"/mnt/run": {"source": "s3://mine", "mode": "MOUNT_CACHED"}}
    assert "--folder /mnt/run" in task["run"] and "ultrascale.jobs.state /mnt/run/big" in task["run"]


EIGHT_IN_A_STORE = ["kubernetes", "run.toml", "--nodes", "8", "--launch.kubernetes.volume", "store"]
WRONG = {
    "nodes that do not give the layout": (
        ["slurm", "run.toml", "--nodes", "4"],
        "4 nodes of 8 ranks are 32 ranks",
        "--nodes 8",
    ),
    "no nodes": (["slurm", "run.toml"], "is missing: nothing says how many", "--nodes N"),
    "zero nodes for a cell": (["slurm", "run.toml", "--nodes", "0", "--measure"], "must be at least 1, is 0", "machines"),
    "zero nodes": (["slurm", "run.toml", "--nodes", "0"], "must be at least 1", "number of machines"),
    "GPUs per node unknown": (["slurm", "run.toml", "--nodes", "8", "--cluster", "auto"], "launch.gpus_per_node", "64xh100"),
    "a time without a unit": (["slurm", "run.toml", "--nodes", "8", "--launch.time-limit", "24"], "has no unit", '"24h"'),
    "too short a time": (["slurm", "run.toml", "--nodes", "8", "--launch.time-limit", "2m"], "too short", '"1h"'),
    "no image": (["kubernetes", "run.toml", "--nodes", "8", "--launch.container", "none"], "pods start from", "Containerfile"),
    "a mounted bucket for several nodes": (
        ["skypilot", "run.toml", "--nodes", "8"],
        "shows none of 8 nodes what another writes",
        "s3://BUCKET/runs",
    ),
    "a bucket beside a store": (
        ["skypilot", "run.toml", "--nodes", "8", "--launch.skypilot.bucket", "s3://mine", *IN_A_BUCKET],
        "is given beside checkpoint.store",
        "one of the two",
    ),
    "no store": (
        EIGHT_IN_A_STORE,
        "is not given",
        "s3://BUCKET",
    ),
    "data that a pod does not see": (
        EIGHT_IN_A_STORE,
        "has data/web, which a pod without a claim does not see",
        "s3://BUCKET/DATA",
    ),
    "a secret's content": (
        ["kubernetes", "run.toml", "--nodes", "8", "--launch.kubernetes.secret", "AKIA/x"],
        "lower-case letters",
        "kubectl get secrets",
    ),
    "a claim that is no name": (
        ["kubernetes", "run.toml", "--nodes", "8", "--launch.kubernetes.claim", "a\n  b: 1"],
        "lower-case letters",
        "kubectl get pvc",
    ),
    "a folder of pods that is relative": (
        ["kubernetes", "run.toml", "--nodes", "8", "--launch.kubernetes.path", "run"],
        "absolute path",
        "/mnt/run",
    ),
    "a size that is none": (
        ["kubernetes", "run.toml", "--nodes", "8", "--launch.kubernetes.shared-memory", "much"],
        "a size as Kubernetes",
        "64Gi",
    ),
    "a line of shell in a partition": (
        ["slurm", "run.toml", "--nodes", "8", "--launch.slurm.partition", "gpu\u2028touch made"],
        "launch.slurm.partition",
        "line break",
    ),
    "a line that ends in a break": (
        ["slurm", "run.toml", "--nodes", "8", "--launch.slurm.partition", "gpu\n"],
        "launch.slurm.partition",
        "line break",
    ),
    "a line of shell in sbatch's options": (
        ["slurm", "run.toml", "--nodes", "8", "--launch.slurm.options=--switches=1\ntouch made"],
        "launch.slurm.options",
        "line break",
    ),
    "a line of shell in a file's name": (
        ["slurm", "run.toml", "--nodes", "8", "--out", "a\ntouch made"],
        "--out",
        "another",
    ),
    "hosts of another number": (["ssh", "run.toml", "--nodes", "8", "--launch.hosts", "a,b"], "names 2 hosts", "one for each"),
    "an odd host": (["ssh", "run.toml", "--nodes", "8", "--launch.hosts", "a;b"], "names no host", "USER@HOST"),
    "an odd variable": (["slurm", "run.toml", "--nodes", "8", "--launch.environment", "A B"], "sets no variable", "NAME=VALUE"),
    "several values": (["slurm", "run.toml", "--nodes", "8", "--layout.tp", "1,2"], "one run is trained", "--measure"),
    "arrays elsewhere": (["ssh", "run.toml", "--nodes", "8", "--measure"], "no arrays", "ultrascale sweep"),
    "both ways": (["slurm", "run.toml", "--nodes", "8", "--print", "--submit"], "beside --submit", "one of the two"),
    "more memory than there is": (
        ["slurm", "run.toml", "--nodes", "8", "--layout.micro-batch-size", "8"],
        "does not fit",
        "plan",
    ),
    "a section that is none": (
        ["slurm", "run.toml", "--nodes", "8", "--launch.slurm.partitoin", "x"],
        "is not a key",
        "partition",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_told_in_a_sentence_before_anything_is_written(case, there, capsys):
    words, rule, remedy = WRONG[case]
    told = refused(capsys, *words)
    assert rule in told and remedy in told and os.listdir(there) == ["run.toml"]


@pytest.mark.parametrize("launcher", ["slurm", "kubernetes", "skypilot", "ssh"])
def test_a_launcher_that_is_not_installed_is_named_and_nothing_is_written(launcher, there, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    hosts = ["--launch.hosts", ",".join(f"h{number}" for number in range(8))] if launcher == "ssh" else []
    told = refused(capsys, launcher, "run.toml", "--nodes", "8", "--submit", *hosts, *IN_A_BUCKET)
    assert "is not installed here" in told and os.listdir(there) == ["run.toml"]


def test_a_text_that_was_edited_is_not_written_over(there, capsys):
    words = ["launch", "slurm", "run.toml", "--nodes", "8"]
    assert main(words) == 0 and main(words) == 0  # the same text may be written again
    file = there / "big.sbatch"
    file.write_text(file.read_text() + "# mine\n")
    assert "it may have been edited" in (capsys.readouterr(), refused(capsys, *words[1:]))[1]
    assert file.read_text().endswith("# mine\n")


def test_what_the_launcher_says_when_it_refuses_is_passed_on(there, capsys, monkeypatch):
    refusing = "echo 'sbatch: error: Invalid partition' >&2; echo 'sbatch: fatal: none' >&2; exit 1"
    (there / "sbatch").write_text(f"#!/bin/sh\ncase $1 in *island-0*) echo Submitted;; *) {refusing};; esac\n")
    (there / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{there}:{os.environ['PATH']}")
    assert main(["launch", "slurm", "run.toml", "--nodes", "4", "--submit", *TWO, *QUORUM]) == 1
    told = capsys.readouterr()
    assert told.out == "Submitted\n"
    err = re.sub(r"\s+", " ", told.err)
    assert "Invalid partition; sbatch: fatal: none; island 0 is submitted: go on with --island 1, each" in err
    assert main(["launch", "slurm", "run.toml", "--nodes", "8", "--submit"]) == 1
    told = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert "refused it: sbatch: error: Invalid partition; sbatch: fatal: none" in told and "mistakes" not in told


def test_how_a_run_is_launched_is_no_part_of_what_is_trained():
    found = resolve("run.toml", ["--launch.time-limit", "24h"])
    plain = resolve("run.toml", [])
    assert found.launch.time_limit_seconds == 86400 and found.launch.container == "registry.example.com/ultrascale:1"
    assert found.run == plain.run and "launch" not in to_toml(found.run)
    assert resolve(None, {"model.preset": "tiny-llama"}).launch == Launch(
        slurm=Slurm(), kubernetes=Kubernetes(), skypilot=SkyPilot()
    )


@pytest.mark.parametrize(
    "written, seconds", [("24h", 86400), ("1d12h", 129600), ("90m", 5400), ("1h 30min", 5400), ("45s", 45)]
)
def test_times_have_units(written, seconds):
    assert parse_seconds(written) == seconds


@pytest.mark.parametrize("written", ["24", "", "h", "24 hours ago", "1-12:00:00", "0h", "1.5h", "-1h"])
def test_what_is_no_time_with_a_unit_is_refused(written):
    with pytest.raises(UnitError, match="a time with units"):
        parse_seconds(written)


def test_time_to_leave_follows_from_what_steps_and_saves_of_the_run_took(there):
    found = resolve("run.toml", [])
    one = job.job_of(found.run, found.launch, file=Path("run.toml"), nodes=8, command="")
    assert (one.grace, one.step_and_save_seconds) == (120, None)
    one.folder.mkdir(parents=True)
    (one.folder / "metrics.jsonl").write_text('{"perf/step_s": 10.0, "perf/save_s": 90.5}\n{"perf/step_s": 12.0}\nnonsense\n')
    again = job.job_of(found.run, found.launch, file=Path("run.toml"), nodes=8, command="")
    assert again.grace == 205 and "took up to 1m42s" in again.grace_reason


STATES = {
    "never begun": ([], "failed"),
    "ended": (["start", "stepped", "end"], "complete"),
    "stopped": (["start", "stepped", "stop"], "stopped"),
    "failed": (["start", "stepped", "failure"], "failed"),
    "cut off": (["start", "stepped"], "failed"),
    "ended after a stop": (["start", "stop", "start", "end"], "complete"),
    "stopped after an end with fewer steps": (["start", "end", "start", "stop"], "stopped"),
}


def test_the_state_of_no_run_is_a_sentence(capsys):
    assert state.main([]) == 2
    assert capsys.readouterr().err == "give the folder of one run: python -m ultrascale.jobs.state FOLDER\n"


@pytest.mark.parametrize("case", STATES)
def test_the_state_of_a_run_is_that_of_its_last_start(case, there):
    kinds, expected = STATES[case]
    rows = [{"event": kind, "step": 3, "time": 1.0} for kind in kinds]
    (there / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "torn {")
    assert state.state_of(there) == expected
    told = subprocess.run([sys.executable, "-m", "ultrascale.jobs.state", str(there)], capture_output=True, text=True)
    assert (told.stdout.strip(), told.returncode) == (expected, state.EXIT_CODES[expected])


BEAT_AND_END = """
import sys
from pathlib import Path
from ultrascale.heartbeat import HeartbeatWriter
heart = HeartbeatWriter(Path(sys.argv[1]), 3, hang_seconds=1.0)
heart.started_at, heart.steps_done = 0, 1
heart.beat("forward")
"""


def test_a_rank_that_gives_no_signs_for_long_is_not_alive_and_one_that_is_gone_is_no_matter(there, capsys):
    from ultrascale import heartbeat

    folder = there / "ultrascale-signs-x"
    folder.mkdir()
    assert alive.main([there], slack_seconds=-2.0) == 0
    heart = heartbeat.HeartbeatWriter(folder, 3, hang_seconds=1.0)
    heart.started_at, heart.steps_done = 0, 1
    heart.beat("forward")
    assert alive.main([there]) == 0
    assert alive.main([there], slack_seconds=-2.0) == 1 and "rank 3 has given no sign of life" in capsys.readouterr().out
    (folder / "3.beat").unlink()
    subprocess.run([sys.executable, "-c", BEAT_AND_END, str(folder)], check=True)
    assert heartbeat.read(folder)[0].rank == 3 and alive.main([there], slack_seconds=-2.0) == 0


def test_the_image_is_built_from_what_is_in_the_repository_and_the_package_index_alone():
    lines = [line for line in (ROOT / "Containerfile").read_text().splitlines() if line and not line.startswith("#")]
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert copied and [name for name in copied if not (ROOT / name).exists()] == []
    ran = [line for line in lines if line.startswith("RUN")]
    extras = {name for line in lines if line.startswith("ARG EXTRA=") for name in re.findall(r"[a-z]+", line)}
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"train", "store"} <= extras <= known.keys()  # checkpoint.store is all that keeps a run of pods without a claim
    assert len(ran) == 1 and "pip install" in ran[0] and not re.search(r"apt|curl|wget|git |ADD ", "\n".join(lines))


TWO = ["--cluster", "32xh100", "--layout.dp", "32", "--islands.count", "2"]
QUORUM, MEET = ["--islands.quorum", "1"], ["--islands.meet", "tcp://head:29400"]


@pytest.mark.parametrize("launcher", [*EVERY, "ssh"])
def test_islands_with_a_quorum_are_a_job_each_with_its_folder_its_port_and_one_place_to_meet(launcher, capsys, there):
    hosts = ["--launch.hosts", "a,b,c,d,e,f,g,h"] * (launcher == "ssh")
    words = ["launch", launcher, "run.toml", "--nodes", "4", *hosts, *TWO, *QUORUM, *MEET, *IN_A_BUCKET]
    assert main(words) == 0
    files, said = sorted(there.glob("big-island-*")), capsys.readouterr().out
    assert len(files) == 2 and all(f"{file.name}\nnext  " in said for file in files)
    for number, told in enumerate([file.read_text() for file in files]):
        assert f"# big-island-{number}: 20,000 steps on 4 nodes of 8 GPUs\n" in told
        assert f"# Island {number} of 2; 1 or more go on. They meet at tcp://head:29400: start it there" in told
        assert f"--island {number}" in told.replace("\n", " ") and "--nproc-per-node 8" in told
        assert ("big/islands/1" in told) == (number == 1) and "@{" not in told
        if launcher == "ssh":
            assert f"hosts=({('a b c d', 'e f g h')[number]})" in told
    one, other = (re.findall(r"--rdzv-endpoint \S+:(\d+)", file.read_text()) for file in files)
    assert launcher == "slurm" or one != other  # Slurm draws it from the job's number
    assert main([*words, "--print", "--island", "1"]) == 0
    one, other = (told.rpartition("Edit it as you like")[2] for told in (capsys.readouterr().out, files[1].read_text()))
    assert one == other


OF_SIZES = ["--islands.dp", "32,16", "--layout.dp-shard", "16", "--batch.sequences-per-batch", "96"]


def test_islands_of_other_sizes_are_jobs_on_as_many_nodes_as_each_needs(capsys, there):
    few = refused(capsys, "slurm", "run.toml", "--nodes", "4", *TWO, *QUORUM, *MEET, *OF_SIZES)
    assert "4 nodes of 8 ranks are 32 ranks, and the layout (dp 16) wants 16" in few and "Take --nodes 2" in few
    hosts = ["--launch.hosts", "a,b,c,d,e,f"]
    for number, (nodes, named) in enumerate([("4", "a b c d"), ("2", "e f")]):
        words = [
            "launch",
            "ssh",
            "run.toml",
            "--nodes",
            nodes,
            *TWO,
            *QUORUM,
            *MEET,
            *OF_SIZES,
            *hosts,
            "--island",
            str(number),
            "--print",
        ]
        assert main(words) == 0
        told = capsys.readouterr().out
        assert f"hosts=({named})" in told and f"--nnodes {nodes}" in told


def test_islands_without_a_quorum_are_one_job_of_all_their_ranks(capsys):
    assert "--nnodes 8" in text(capsys, "torchrun", *TWO)
    few = refused(
        capsys, "torchrun", "run.toml", "--nodes", "4", "--islands.count", "2", "--layout.dp", "32", "--cluster", "32xh100"
    )
    assert "4 nodes of 8 ranks are 32 ranks, and 2 islands of it (dp 32) want 64" in few and "Take --nodes 8" in few


@pytest.mark.parametrize(("launcher", "words", "said"), [
    ("slurm", [*QUORUM, "--print"], "--print is one text, and 2 islands with a quorum (islands.quorum) are a job each"),
    ("torchrun", [*QUORUM, "--submit"], "--submit is one text, and 2 islands with a quorum"),
    ("slurm", [*QUORUM, "--island", "2"], "--island is 2, of 2 islands"),
    ("slurm", ["--island", "0"], "--island is given, and without islands.quorum a run is one job"),
    ("kubernetes", [*QUORUM], "islands.meet is a folder, and each island has a volume of its own"),
    ("ssh", [*QUORUM, "--launch.hosts", "a,b"], "launch.hosts names 2 hosts for 4 nodes of each of 2 islands"),
    ("slurm", [*QUORUM, "--measure", "--island", "1"], "--island is given beside --measure"),
    ("ssh", [*QUORUM, *OF_SIZES, "--island", "0", "--launch.hosts", "a,b"], "names 2 hosts for 4 + 2 nodes of 2 islands"),
    ("torchrun", [*QUORUM, "--launch.port", "65535"], "2 islands, a port each, go up to 65536, past 65535"),
    ("slurm", [*QUORUM, "--launch.gpus-per-node", "16"], "4 nodes of 16 ranks are 64 ranks, and the layout (dp 32) wants 32"),
])  # fmt: skip
def test_jobs_of_islands_that_cannot_be_are_refused_in_a_sentence(launcher, words, said, capsys, there):
    told = refused(capsys, launcher, "run.toml", "--nodes", "4", *TWO, *words)
    assert said in re.sub(r"\s+", " ", told), told
    assert not [*there.glob("big*")]
