"""Scripts for machines without a batch system: one for each node, and one that starts it over ssh."""

from __future__ import annotations

from pathlib import Path

from ultrascale.description.problems import mistake
from ultrascale.jobs.job import Job
from ultrascale.jobs.text import exports, fill, head, quoted, setup, train_words


def torchrun_text(job: Job, file: Path) -> str:
    """The script that every node runs, with its node rank and the first node's name."""
    if job.nodes == 1:
        usage, arguments = [f"  bash {file}"], "number=0 first=127.0.0.1"
    else:
        numbers = (0, 1) if job.nodes == 2 else (0, 1, job.nodes - 1)
        usage = [f"  bash {file} {number:<4} FIRST_HOST" for number in numbers]
        missing = f":?is missing: give the number of this node, 0 to {job.nodes - 1}, and the name of the first node"
        arguments = f'number="${{1{missing}}}" first="${{2{missing}}}"'
    return fill("torchrun.sh", usage="\n".join(f"# {line}" for line in usage), arguments=arguments, **_shared(job))


def ssh_text(job: Job, file: Path) -> str:
    """The script that starts the other one on every host. Raises SpecError unless there are as many hosts as nodes."""
    nodes = [job.nodes] if job.island is None else [world // job.ranks_per_node for world in job.run.worlds]
    hosts, islands = job.launch.hosts, len(nodes)
    if len(hosts) != sum(nodes):
        many = f"{job.nodes} nodes of each of" if len({*nodes}) == 1 else f"{' + '.join(map(str, nodes))} nodes of"
        rule = f"names {len(hosts)} hosts for " + (f"{many} {islands} islands" if islands > 1 else f"{job.nodes} nodes")
        raise mistake("launch.hosts", rule, 'Name one for each: [launch] hosts = ["node1", "user@node2"].')
    hosts = hosts[sum(nodes[: job.island or 0]) :][: job.nodes]
    inside = torchrun_text(job, file)
    python = f"cd {quoted([Path.cwd()])} && {{ {'; '.join(job.launch.setup) or ':'}; }} >/dev/null"
    state = f"{python} && python -m ultrascale.jobs.state {quoted([job.folder])}"
    return fill("ssh.sh", head=head(job), text_file=file, hosts=quoted(hosts), node_script=inside,
                folder=quoted([quoted([job.folder.absolute()])]), state_words=quoted([state]))  # fmt: skip


def _leave_by(job: Job) -> str:
    seconds = job.launch.time_limit_seconds
    return "" if seconds is None else f" --leave-by $(($(date +%s) + {seconds}))"


def _shared(job: Job) -> dict[str, object]:
    return {
        "head": head(job), "here": quoted([Path.cwd()]), "setup": setup(job), "exports": exports(job), "nodes": job.nodes,
        "ranks": job.ranks_per_node, "restarts": job.launch.restarts, "name": quoted([job.name]), "port": job.port,
        "folder": quoted([job.folder]), "train": train_words(job) + _leave_by(job),
        "numa": " --numa-binding node" if job.on_gpus else "",
        "gpus_wanted": f" --gpus {job.ranks_per_node}" if job.on_gpus else "",
    }  # fmt: skip
