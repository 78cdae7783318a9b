"""A Slurm of this machine's own: munged, slurmctld and three slurmd, on ports and in a folder of their own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
NODES = ("n1", "n2", "n3")
CONFIG = """
ClusterName=ultrascale
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdTimeout=30
KillWait=60
JobRequeue=1
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[3]}] CPUs=1 RealMemory=500
PartitionName=all Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
"""


class NoSlurm(Exception):
    """Slurm cannot run here; the text says why."""


@dataclass
class Slurm:
    """One that runs."""

    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def says(self, *words: str) -> str:
        """What one of its commands prints. Raises CalledProcessError."""
        return subprocess.run(words, env=self.environment, check=True, capture_output=True, text=True).stdout.strip()

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETING, ..."""
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        parts = [part.partition("=") for part in self.says("scontrol", "--oneliner", "show", "job", job).split()]
        return next((value for key, _, value in parts if key == name), "")

    def start_now(self, job: str, restarts: int) -> None:
        """Let a job begin that is queued again for the so-manieth time. Slurm has it wait for two minutes, until slurmd has
        forgotten that the job was ended: one that begins in the same second is refused."""
        wait_until(lambda: self.field(job, "Restarts") == str(restarts), f"job {job} is queued again")
        wait_until(lambda: self._short_state(job) != "CG", f"job {job} has left its nodes")
        if self._short_state(job) == "PD":
            time.sleep(2.5)
            self.says("scontrol", "update", f"JobId={job}", "StartTime=now")
        wait_until(lambda: self._short_state(job) != "PD", f"job {job} begins again")

    def _short_state(self, job: str) -> str:
        return self.says("squeue", "-h", "-j", job, "-o", "%t")

    def kill_node(self, name: str) -> None:
        """As if its power went: slurmd and all that it has started."""
        daemon = self.daemons.pop(name)
        mine = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _runs_on(pid, name, daemon.pid)]
        for pid in mine:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait()


def start_node(here: Slurm, name: str) -> None:
    """Its slurmd."""
    _start(here, name, "slurmd", "-D", "-c", "-f", str(here.folder / "slurm.conf"), "-N", name)


def _runs_on(pid: int, node: str, daemon: int) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    is_step = words.startswith(b"slurmstepd") and b"SLURMD_NODENAME" not in environment and _parent(pid) == daemon
    return pid == daemon or is_step or f"SLURMD_NODENAME={node}\0".encode() in environment + b"\0"


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def wait_until(holds: Callable[[], bool], what: str, *, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"too slow, or never: {what}"
        time.sleep(0.3)


@contextmanager
def slurm() -> Iterator[Slurm]:
    """While inside, it runs. Raises NoSlurm where it cannot."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if missing:
        raise NoSlurm(f"not installed: {', '.join(missing)} (apt-get install slurmctld slurmd slurm-client munge)")
    if os.geteuid() != 0:
        raise NoSlurm("its daemons are started by root here, and this is not root")
    here = Slurm(Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp")))
    os.chmod(here.folder, 0o755)
    try:
        _begin(here)
        yield here
    finally:
        for daemon in reversed(here.daemons.values()):
            daemon.terminate()
        for daemon in here.daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
        shutil.rmtree(here.folder, ignore_errors=True)


def _begin(here: Slurm) -> None:
    folder = here.folder
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    text = CONFIG.format(host=socket.gethostname().split(".")[0], folder=folder, nodes="n[1-3]", ports=_free_ports(4))
    (folder / "slurm.conf").write_text(text)
    names = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid", "log-file": "munged.log",
             "seed-file": "munged.seed"}  # fmt: skip
    munge = [f"--{key}={folder / name}" for key, name in names.items()]
    _start(here, "munged", "munged", "--foreground", "--force", *munge)
    wait_until((folder / "munge.sock").exists, "munged")
    config = str(folder / "slurm.conf")
    _start(here, "slurmctld", "slurmctld", "-D", "-c", "-f", config)
    for node in NODES:
        start_node(here, node)
    deadline = time.monotonic() + 60
    while _idle(here) != len(NODES):
        if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in here.daemons.values()):
            logs = [path.read_text().splitlines()[-1:] for path in sorted(folder.glob("*.log"))]
            raise NoSlurm(f"its daemons do not come up: {logs}")
        time.sleep(0.3)


def _start(here: Slurm, name: str, *words: str) -> None:
    program = shutil.which(words[0], path=PATH) or words[0]
    with open(here.folder / f"{name}.said", "wb") as said:
        here.daemons[name] = subprocess.Popen(
            [program, *words[1:]], env=here.environment, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip


def _idle(here: Slurm) -> int:
    try:
        return here.says("sinfo", "-h", "-N", "-o", "%T").split().count("idle")
    except subprocess.CalledProcessError:
        return 0


def _free_ports(count: int) -> list[int]:
    """Ports in a row that nobody listens on."""
    for first in range(17_000 + os.getpid() % 2_000, 19_900, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for number, one in enumerate(sockets):
                one.bind(("127.0.0.1", first + number))
            return list(range(first, first + count))
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise NoSlurm("no ports are free")
