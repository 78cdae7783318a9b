"""A SkyPilot task: a managed job, whose machines are replaced when the cloud reclaims them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.description.problems import mistake
from ultrascale.description.run import Run
from ultrascale.jobs.environment import variables
from ultrascale.jobs.job import Job
from ultrascale.jobs.kubernetes import expect_server, node_script, object_name
from ultrascale.jobs.text import block, fill, head, no_time_limit, setup
from ultrascale.storage import url_of

MOUNT = "/mnt/run"
MOUNTS = """\
file_mounts:
  # Run folders. A checkpoint becomes visible by a rename, which buckets do not have: MOUNT_CACHED has a disk before them that
  # does. MOUNT would fail at the first save.
  {mount}:
    {source}
    mode: MOUNT_CACHED"""
RESTARTS_ON_ERRORS = 5
"""Restarts of the whole job when its own commands fail; preemptions by the cloud do not count."""
NAMES = {
    "h100-sxm": "H100", "a100-40": "A100", "a100-80": "A100-80GB", "v100-16": "V100", "v100-32": "V100-32GB",
    "a6000": "RTXA6000", "rtx-6000-ada": "RTX6000-Ada",
}  # fmt: skip
"""SkyPilot's accelerator names that are not this package's in capitals."""


def skypilot_text(job: Job, file: Path) -> str:
    """The task. Raises SpecError if the accelerator is unknown, or a run on several nodes has no shared storage."""
    bucket, store = job.launch.skypilot.bucket, job.run.checkpoint.store
    expect_server(job, "launch.skypilot.bucket")
    name = object_name(job.name)
    if store is not None and url_of(store) is not None:
        node_job = job
        mounts = f"# The run's folder is on each node's own disk, and goes with it: {store} keeps the run."
        if bucket is not None:
            raise mistake("launch.skypilot.bucket", "is given beside checkpoint.store", "Keep one of the two.")
    elif job.nodes > 1:
        rule = f"is {store or 'not given'}, and a bucket that is mounted shows none of {job.nodes} nodes what another writes"
        raise mistake("checkpoint.store", rule, 'Name a store, which each node sends its own parts to: "s3://BUCKET/runs".')
    else:
        node_job = replace(job, run=replace(job.run, folder=MOUNT), settings=(*job.settings, "--folder", MOUNT))
        source = f"name: {name}-runs" if bucket is None else f"source: {json.dumps(bucket)}"
        mounts = MOUNTS.format(mount=MOUNT, source=source)
    install = f"pip install '.[{_extras(job.run)}]'  # where the folder is a checkout of ultrascale"
    return fill(
        "skypilot.yaml", head=head(no_time_limit(job)), text_file=file, name=name, nodes=job.nodes, mounts=mounts,
        resources="\n".join(f"  {line}" for line in _resources(job)),
        env=block("\n".join(f"# {var.reason}\n{var.name}: {json.dumps(var.value)}" for var in variables(job)), 2),
        setup=block(setup(job, default=[install]), 2),
        script=block(node_script(node_job, first="$first", number="SKYPILOT_NODE_RANK"), 2),
    )  # fmt: skip


def _extras(run: Run) -> str:
    """Extras of the package that the run needs: for training, and for the stores of its checkpoints and data."""
    urls = map(url_of, (run.checkpoint.store or "", *(source.path for source in (*run.data.sources, *run.data.validation))))
    return ",".join(["train", *sorted({"hub" if url.startswith("hf:") else "store" for url in urls if url})])


def _resources(job: Job) -> Iterator[str]:
    config = job.launch.skypilot
    if config.infra is not None:
        yield f"infra: {json.dumps(config.infra)}"
    if job.on_gpus:
        yield f"accelerators: {json.dumps(f'{config.accelerator or _accelerator(job)}:{job.ranks_per_node}')}"
    if job.launch.container is not None:
        yield f"image_id: {json.dumps(f'docker:{job.launch.container}')}"
    yield f"use_spot: {str(config.spot).lower()}"
    yield "job_recovery:"
    yield "  strategy: EAGER_NEXT_REGION  # where machines were taken away there are none for a while"
    yield f"  max_restarts_on_errors: {RESTARTS_ON_ERRORS}"


def _accelerator(job: Job) -> str:
    """SkyPilot's name of the run's accelerator: H100, A100-80GB, RTX4090."""
    if job.run.cluster == "auto":
        remedy = 'Give SkyPilot\'s name, such as "H100" (`sky gpus list`), or name the machines: cluster = "64xh100".'
        raise mistake("launch.skypilot.accelerator", "is not given, and cluster = auto names none", remedy)
    name = parse_cluster(job.run.cluster).accelerator.kind
    return NAMES.get(name, name.upper().replace("RTX-", "RTX"))
