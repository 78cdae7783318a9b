"""Launch on a cluster: the section `[launch]`, from which `ultrascale launch` writes job scripts.

It does not affect what is computed, so it is not part of a `Run`: neither checkpoints nor the run's folder contain it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ultrascale.description.problems import Problem
from ultrascale.description.units import parse_seconds

MOST_NODES = 100_000
_NAME_AND_VALUE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*")
_LABEL, _SIZE = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", r"[0-9]+(\.[0-9]+)?(k|[KMGTPE]i|[MGTPE]|[eE][0-9]+)?"
_OF_KUBERNETES = {
    "namespace": (_LABEL, "lower-case letters, digits and '-'", "Name one that `kubectl get namespaces` lists."),
    "secret": (
        rf"{_LABEL}(\.{_LABEL})*", "lower-case letters, digits, '-' and '.'",
        "Name one that `kubectl get secrets` lists; its content stays there.",
    ),
    "claim": (rf"{_LABEL}(\.{_LABEL})*", "lower-case letters, digits, '-' and '.'", "Name one that `kubectl get pvc` lists."),
    "network": (r"[\w./-]+=[1-9]\d*", "a resource and a number", 'Write "rdma/hca=8".'),
    "size": (_SIZE, "a size as Kubernetes has them", 'Write "1Ti".'),
    "shared_memory": (_SIZE, "a size as Kubernetes has them", 'Write "64Gi".'),
    "path": (r"/[^:\n]*", "an absolute path without ':'", 'Write "/mnt/run".'),
}  # fmt: skip
"""Form of a key's value, as a regular expression and as text, and the remedy."""


@dataclass(frozen=True)
class Slurm:
    """Options of sbatch, and the container runtime."""

    partition: str | None = None
    """Partition (queue), `sbatch --partition`. None: the cluster's default."""
    account: str | None = None
    """Account to charge, `sbatch --account`."""
    qos: str | None = None
    """Quality of service, `sbatch --qos`."""
    reservation: str | None = None
    """Reservation, `sbatch --reservation`."""
    constraint: str | None = None
    """Features that nodes must have, `sbatch --constraint`."""
    exclusive: bool = True
    """Request whole nodes: other jobs on a node slow down every step by their traffic and page cache."""
    requeue: bool = True
    """Requeue the job when its time limit is reached, a node fails or the job is preempted, until the run is complete."""
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """Runtime of `launch.container`: enroot through pyxis (srun --container-image), or apptainer exec."""
    options: tuple[str, ...] = ()
    """Additional `#SBATCH` options, such as "--switches=1"."""


@dataclass(frozen=True)
class Kubernetes:
    """Kubernetes objects of a run."""

    kind: Literal["trainjob", "jobset"] = "trainjob"
    """A TrainJob with its own runtime (Kubeflow Trainer 2), or the JobSet that it would create."""
    namespace: str = "default"
    """Namespace of the objects."""
    volume: Literal["claim", "store"] = "claim"
    """Storage of the run: a claim that all pods mount, or `checkpoint.store` with a local disk per pod."""
    secret: str | None = None
    """Secret whose entries become environment variables of every pod, such as a store's credentials. None: the pods' own
    role."""
    claim: str | None = None
    """PersistentVolumeClaim with the run, data and folders, which every node mounts (ReadWriteMany). None: one is created."""
    size: str = "1Ti"
    """Size of the PersistentVolumeClaim that is created if `claim` is not set."""
    path: str = "/mnt/run"
    """Mount point of the volume, and working directory of the command: paths in the run are relative to it."""
    shared_memory: str = "64Gi"
    """Size limit of /dev/shm, through which NCCL and gloo communicate within a node; a container's default is 64 MiB."""
    queue: str | None = None
    """Local queue of Kueue."""
    network: str | None = None
    """Resource of network cards that every pod requests, such as "rdma/hca=8"."""


@dataclass(frozen=True)
class SkyPilot:
    """Resources of a SkyPilot task."""

    accelerator: str | None = None
    """SkyPilot's name of the accelerator, such as H100. None: derived from `cluster`."""
    infra: str | None = None
    """Infrastructure: aws, gcp/us-central1, k8s, ... None: the cheapest that is enabled."""
    spot: bool = True
    """Spot instances, which may be preempted and are then replaced: the run resumes from its newest checkpoint."""
    bucket: str | None = None
    """Bucket for the folder of a run on one node (several nodes use `checkpoint.store`), s3://NAME or gs://NAME. None: one with
    the run's name, created by SkyPilot."""


@dataclass(frozen=True)
class Launch:
    """Nodes, their time limit, and the setup on each before the ranks start."""

    nodes: int | None = None
    """Number of nodes; `--nodes` overrides it."""
    gpus_per_node: int | None = None
    """Ranks per node, one per GPU (or processes, if device = "cpu"). None: the accelerators per node of `cluster`."""
    time_limit: str | None = None
    """Time limit of one job, with a unit: "24h", "1d12h", "90m". The trainer saves and exits before it. None: the cluster's
    default."""
    setup: tuple[str, ...] = ()
    """Shell commands at the start of every job: "module load cuda", "source .venv/bin/activate"."""
    environment: tuple[str, ...] = ()
    """Additional environment variables, "NAME=VALUE"; they override the script's own."""
    container: str | None = None
    """Container image: a name in a registry, or a .sqsh or .sif file."""
    mounts: tuple[str, ...] = ()
    """Folders to mount in the container in addition to the current one."""
    network_interface: str | None = None
    """Network interface over which ranks connect (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)."""
    network_cards: str | None = None
    """InfiniBand or RoCE cards for NCCL (NCCL_IB_HCA), such as "mlx5". None: all that NCCL finds."""
    hosts: tuple[str, ...] = ()
    """Hosts of `ultrascale launch ssh`, one per node; the rendezvous is on the first."""
    port: int | None = None
    """Port of the rendezvous on the first node. None: derived from the job's number or the run's name."""
    restarts: int = 3
    """Number of times that torchrun restarts the ranks within a job before the job ends."""
    slurm: Slurm = field(default_factory=Slurm)
    kubernetes: Kubernetes = field(default_factory=Kubernetes)
    skypilot: SkyPilot = field(default_factory=SkyPilot)

    @property
    def time_limit_seconds(self) -> int | None:
        return None if self.time_limit is None else parse_seconds(self.time_limit)

    def problems(self) -> Iterator[Problem]:
        """Values that no launcher accepts."""
        for key in ("nodes", "gpus_per_node"):
            value = getattr(self, key)
            if value is not None and not 1 <= value <= MOST_NODES:
                yield Problem(f"launch.{key}", f"must be from 1 to {MOST_NODES:,}, is {value:,}", "Give a number between them.")
        if self.port is not None and not 1024 <= self.port <= 65535:
            yield Problem("launch.port", f"must be from 1024 to 65535, is {self.port}", "Leave it out, and it is drawn.")
        if self.restarts < 0:
            yield Problem("launch.restarts", f"must be at least 0, is {self.restarts}", "0 leaves every restart to the queue.")
        for text in self.environment:
            if not _NAME_AND_VALUE.fullmatch(text):
                yield Problem("launch.environment", f"has {text!r}, which sets no variable", 'Write "NAME=VALUE".')
        for section, fields in (("launch", vars(self)), ("launch.slurm", vars(self.slurm))):
            for key, value in fields.items():
                if any(len(f"{text}.".splitlines()) > 1 for text in (value if isinstance(value, tuple) else (value,))):
                    yield Problem(f"{section}.{key}", "has a line break in a value", "Give each line an item of its own.")
        for host in self.hosts:
            if not re.fullmatch(r"[\w.@:-]+", host) or host.startswith("-"):
                yield Problem("launch.hosts", f"has {host!r}, which names no host", "Write HOST or USER@HOST.")
        for key, (form, rule, remedy) in _OF_KUBERNETES.items():
            value = getattr(self.kubernetes, key)
            if value is not None and not re.fullmatch(form, value):
                yield Problem(f"launch.kubernetes.{key}", f"must be {rule}, is {value!r}", remedy)
        if self.skypilot.bucket is not None and not re.fullmatch(r"\w+://[\w./-]+", self.skypilot.bucket):
            rule = f"must be the address of a bucket, is {self.skypilot.bucket!r}"
            yield Problem("launch.skypilot.bucket", rule, "Write s3://NAME or gs://NAME.")
