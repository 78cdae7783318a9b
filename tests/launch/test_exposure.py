"""What a run on one machine shows to the outside: no port, and no secret in anything that it writes or says."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from train.small_runs import make_corpus, small_run

from ultrascale.config.resolve import to_toml
from ultrascale.description.layout import Layout

LISTENS = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, ::1 and ::ffff:127.0.0.1, as the kernel prints them."""
EVERYWHERE = {"00000000", "0" * 32}
"""0.0.0.0 and ::."""
CANARIES = {
    "WANDB_API_KEY": "canary-wandb-4f1b", "HF_TOKEN": "canary-hf-93ac", "AWS_SECRET_ACCESS_KEY": "canary-aws-77d0",
    "DATABASE_URL": "postgres://user:canary-url-c0de@host/db", "MY_PASSWORD": "canary-pass-12ef",
}  # fmt: skip


def listening(pids: set[int]) -> set[str]:
    """Local addresses on which these processes accept connections, as `/proc/net/tcp` has them."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes.add(os.readlink(fd))
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in (Path("/proc/net") / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1])
    return found


def family(pid: int) -> set[int]:
    try:
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    except psutil.NoSuchProcess:
        return set()


def watch(words: list[str], *, seen_file: Path | None = None) -> tuple[int, str, set[str]]:
    """Run a command with canaries in its environment; its exit code, what it said, and where it listened. `seen_file` is made
    once it was seen to listen."""
    environment = {**os.environ, **CANARIES}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    seen: set[str] = set()
    while process.poll() is None:
        with suppress(OSError):
            seen |= listening(family(process.pid))
            if seen and seen_file is not None:
                seen_file.touch()
        time.sleep(0.05)
    return process.returncode, process.communicate()[0], seen


def leaks(folder: Path, said: str) -> list[str]:
    """Canaries in anything under `folder` or in `said`."""
    texts = {"output": said.encode()} | {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert len(texts) > 1
    return [f"{name} in {where}" for where, text in texts.items() for name, value in CANARIES.items() if value.encode() in text]


@pytest.fixture
def description(tmp_path) -> Path:
    make_corpus(tmp_path / "tokens")
    run = small_run(tmp_path / "out", layout=Layout(dp=2, micro_batch_size=1))
    run = replace(run, data=replace(run.data, sources=(replace(run.data.sources[0], path=str(tmp_path / "tokens")),)))
    path = tmp_path / "run.toml"
    path.write_text(to_toml(replace(run, checkpoint=replace(run.checkpoint, export=False, every_steps=4))))
    return path


def train(description: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "ultrascale", "train", str(description), "--processes", "2", *more]


def test_two_processes_on_one_machine_listen_on_loopback_only_and_write_no_secret(description, tmp_path):
    code, said, seen = watch(train(description))
    assert code == 0, said
    assert seen and {address.partition(":")[0] for address in seen} <= LOOPBACK
    assert leaks(tmp_path / "out", said) == []


@pytest.mark.nightly
def test_under_torchrun_the_stores_listen_on_every_interface_as_the_documentation_says(description):
    """Nothing of ours can bind them. If a newer torch does, docs/security.md is to be changed."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    code, said, seen = watch([*words, "-m", "ultrascale", "train", str(description)])
    assert code == 0, said
    assert EVERYWHERE & {address.partition(":")[0] for address in seen}


@pytest.mark.nightly
def test_a_run_that_fails_writes_no_secret_either(description, tmp_path):
    (tmp_path / "out" / "small").mkdir(parents=True)
    (tmp_path / "tokens.bin").write_bytes(b"\xff" * (tmp_path / "tokens.bin").stat().st_size)
    code, said, _ = watch(train(description))
    assert code != 0 and "Traceback" not in said
    assert leaks(tmp_path / "out", said) == []


def test_control_a_server_on_every_address_and_a_written_environment_are_seen(tmp_path):
    script = (
        "import json, os, socket, sys, time; s = socket.create_server(('', 0)); "
        "open(sys.argv[1] + '/env.json', 'w').write(json.dumps(dict(os.environ)))\n"
        "while not os.path.exists(sys.argv[1] + '/seen'): time.sleep(0.05)"
    )
    _, said, seen = watch([sys.executable, "-c", script, str(tmp_path)], seen_file=tmp_path / "seen")
    assert not {address.partition(":")[0] for address in seen} <= LOOPBACK
    assert len(leaks(tmp_path, said)) == len(CANARIES)
