"""Manifests for kubectl: a TrainJob with its runtime (Kubeflow Trainer 2), or the plain JobSet that results from it.

Both contain the same JobSet: one Indexed Job whose pods are the nodes, each with one torchrun. Names follow from it: the first
pod is NAME-node-0-0.NAME, where the rendezvous takes place.
"""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path

from ultrascale.description.problems import Problem, SpecError, mistake
from ultrascale.jobs.environment import variables
from ultrascale.jobs.job import Job
from ultrascale.jobs.text import block, fill, head, no_time_limit, quoted, setup, train_words
from ultrascale.storage import url_of

LEAVING_SECONDS = 60
"""Seconds for torchrun and the shell to exit after the ranks."""
MAX_RESTARTS = 20
"""Restarts of all pods, not counting those because the cluster reclaimed a node."""
LONGEST_NAME = 40
"""Longest name: JobSet appends to it, and a label has 63 characters."""
MARK = 9
"""Characters of a hash that distinguish shortened names."""

RUN_FILE = """\
---
# The run's file. All else that the run has is in its checkpoint.store: each pod begins with an empty disk of its own.
apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}-file
  namespace: "{namespace}"
data:
  run.toml: {text}
"""


def kubernetes_text(job: Job, file: object) -> str:
    """Manifest to apply. Raises SpecError if the run names no image."""
    config, image = job.launch.kubernetes, job.launch.container
    if image is None:
        remedy = 'Build one with the repository\'s Containerfile, and name it: [launch] container = "registry/ultrascale:1".'
        raise mistake("launch.container", "is not given, and pods start from an image", remedy)
    name = object_name(job.name)
    if config.claim is None:
        expect_server(job, "launch.kubernetes.claim")
    claim, described = config.claim or f"{name}-run", ""
    if config.volume == "store":
        _expect_store(job)
        described = RUN_FILE.format(name=name, namespace=config.namespace, text=_text(job.file.read_text()))
    elif config.claim is None:
        described = fill("claim.yaml", claim=claim, namespace=config.namespace, size=_text(config.size))
    labels = "" if config.queue is None else f"\n  labels:\n    kueue.x-k8s.io/queue-name: {_text(config.queue)}"
    depth = 2 if config.kind == "jobset" else 6
    return fill(
        f"{config.kind}.yaml", head=head(no_time_limit(job)), text_file=file,
        name=name, namespace=config.namespace, labels=labels, claim_text=described,
        nodes=job.nodes, ranks=job.ranks_per_node, spec=block(_jobset_spec(job, name, claim), depth),
    )  # fmt: skip


def expect_server(job: Job, key: str) -> None:
    """Raise SpecError if the islands' store is a folder, but they share no volume (`key`)."""
    if job.island is not None and not job.run.islands.meet.startswith("tcp://"):
        rule = f"is a folder, and each island has a volume of its own ({key})"
        remedy = "Name a server that all of them reach, tcp://HOST:PORT: python -m ultrascale.islands.store HOST PORT."
        raise mistake("islands.meet", rule, remedy)


def _expect_store(job: Job) -> None:
    """Raise SpecError with everything that prevents keeping the run in a store, if its pods have only local disks."""
    run, config, key = job.run, job.launch.kubernetes, "launch.kubernetes.volume"
    problems = []
    if run.checkpoint.store is None or url_of(run.checkpoint.store) is None:
        rule = f"is {run.checkpoint.store or 'not given'}, and the disk of a pod goes with it ({key} is store)"
        problems.append(Problem("checkpoint.store", rule, 'Name a store: "s3://BUCKET/runs".'))
    for source in (*run.data.sources, *run.data.validation):
        if url_of(source.path) is None:
            rule = f"has {source.path}, which a pod without a claim does not see ({key} is store)"
            problems.append(Problem("data", rule, "Copy the prepared folder into the store, and name that: s3://BUCKET/DATA."))
    if config.claim is not None:
        problems.append(Problem("launch.kubernetes.claim", f"is given beside {key} = store", "Keep one of the two."))
    if problems:
        raise SpecError(problems)


def object_name(name: str) -> str:
    """A run's name in the form that Kubernetes requires of services: lower-case letters, digits and dashes, a letter first."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    slug = slug if slug[0].isalpha() else f"run-{slug}"
    if len(slug) <= LONGEST_NAME:
        return slug
    return f"{slug[: LONGEST_NAME - MARK].strip('-')}-{zlib.crc32(name.encode()):08x}"


def _jobset_spec(job: Job, name: str, claim: str) -> str:
    config = job.launch.kubernetes
    limits = {"nvidia.com/gpu": job.ranks_per_node} if job.on_gpus else {}
    if config.network is not None:
        resource, _, count = config.network.partition("=")
        limits[resource] = int(count)
    security = (
        "\n# Cards read and write memory that must stay where it is.\nsecurityContext:\n  capabilities:\n    add: [IPC_LOCK]"
    )
    script = node_script(job, first=f"{name}-node-0-0.{name}", number="JOB_COMPLETION_INDEX")
    return fill(
        "jobset_spec.yaml", max_restarts=MAX_RESTARTS, nodes=job.nodes, grace=job.grace + LEAVING_SECONDS,
        grace_reason=f"To save and leave is given {job.grace_reason}.",
        image=_text(job.launch.container), path=_text(config.path),
        script=block(_literal(script), 20),
        env=block(_env(job), 18), volume=block(_volume(job, name, claim), 14), mount=block(_mount(job), 18),
        shared_memory=_text(config.shared_memory),
        secret=block("" if config.secret is None else f"\nenvFrom:\n  - secretRef:\n      name: {_text(config.secret)}", 16),
        resources=block("limits:\n" + "\n".join(f"  {key}: {count}" for key, count in limits.items()) if limits else "{}", 18),
        security=block(security, 16) if config.network else "", probe='python, -m, ultrascale.jobs.alive',
    )  # fmt: skip


def _volume(job: Job, name: str, claim: str) -> str:
    """The volume for the run's folder, and without a claim that has it, for its file."""
    if job.launch.kubernetes.volume == "claim":
        return f"- name: run\n  persistentVolumeClaim:\n    claimName: {_text(claim)}"
    disk = "# Each pod's own, and goes with it: the next one goes on from checkpoint.store.\n- name: run\n  emptyDir: {}"
    return f"{disk}\n- name: file\n  configMap:\n    name: {name}-file"


def _mount(job: Job) -> str:
    config = job.launch.kubernetes
    rows = [f"- name: run\n  mountPath: {_text(config.path)}"]
    if config.volume == "store":
        rows.append(f"- name: file\n  mountPath: {_text(Path(config.path) / job.file)}\n  subPath: run.toml")
    return "\n".join(rows)


def node_script(job: Job, *, first: str, number: str) -> str:
    """Shell commands of one node among several that start together; `first` and `number`: shell expressions for the rendezvous
    host and the node's rank."""
    return fill(
        "node.sh", setup=setup(job), folder=quoted([job.folder]), nodes=job.nodes, ranks=job.ranks_per_node, first=first,
        gpus_wanted=f" --gpus {job.ranks_per_node}" if job.on_gpus else "", restarts=job.launch.restarts,
        name=quoted([job.name]), port=job.port, number=number, train=train_words(job),
        numa=" --numa-binding node" if job.on_gpus else "",
    )  # fmt: skip


def _env(job: Job) -> str:
    rows = [f"# {var.reason}\n- name: {var.name}\n  value: {_text(_literal(var.value))}" for var in variables(job)]
    return "\n".join(rows)


def _literal(text: str) -> str:
    """Escape text for the kubelet, which expands $(NAME) as a variable and $$ as a dollar; other $(...) are unchanged."""
    return re.sub(r"\$\$|\$\(\w+\)|(\$\([^)]*\))", lambda match: match[1] or match[0].replace("$", "$$"), text)


def _text(value: object) -> str:
    """A YAML string, written as JSON."""
    return json.dumps(str(value), ensure_ascii=False)
