"""A hole in torch's restricted unpickler, planted here, opens no file, connection, process or signal to a hostile pickle."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import shutil
import socket
import tempfile
import traceback
from collections.abc import Generator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ultrascale.cli.main import main
from ultrascale.models.files import unpickle

HOLE = Path(unpickle.__file__).read_text().replace('"cpu", weights_only=True', '"cpu", weights_only=False')
WITHOUT = {
    "filter": ('"x86_64": (', '"another": ('),
    "Landlock": ("RESTRICT_SELF = 444, 446", "RESTRICT_SELF = 999, 999"),
    "namespace": (
        "CLONE_NEWNET, PR_SET_NO_NEW_PRIVS = 0x10000000, 0x40000000, 38",
        "CLONE_NEWNET, PR_SET_NO_NEW_PRIVS = 0, 0, 38",
    ),
}
KERNEL = f"{platform.system()} {platform.release()} on {platform.machine()}"
ORDINARY = 1234 if os.getuid() == 0 else os.getuid()
USERS = [
    pytest.param(0, id="root", marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can start it as root")),
    pytest.param(ORDINARY, id="ordinary user"),
]
ATTEMPTS = {
    "read": "open(home + '/notes').read()", "list": "os.listdir('/')", "stat": "os.stat(home + '/notes')",
    "bashrc": "open(home + '/.bashrc', 'a').close()", "tmp": "open('/tmp' + mark, 'x').close()",
    "shm": "open('/dev/shm' + mark, 'x').close()",
    "remove": "os.remove(home + '/old')", "chmod": "os.chmod(home + '/notes', 0o666)",
    "unix": "socket.socket(socket.AF_UNIX).connect(home + '/socket')",
    "abstract": "socket.socket(socket.AF_UNIX).connect('\\0' + home)",
    "tcp": "socket.socket().connect((b'127.0.0.1', port))", "signal": "os.kill(os.getppid(), 0)",
    "limit": "resource.prlimit(os.getppid(), resource.RLIMIT_CORE)", "owner": "fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())",
    "fork": "os.fork() or os._exit(0)", "exec": "os.posix_spawn('/bin/true', ['true'], {})",
    "thread": "_thread.start_new_thread(id, (0,))",
}  # fmt: skip
"""What somebody in the process would try: each raises where it fails."""
STARTS = {"fork", "exec", "thread"}
"""What a limit of processes holds without any filter."""
OTHERS = {"signal", "limit"}
"""What nobody cannot do to root's processes in any case."""


class Attempt:
    """A key of a pickled dictionary that, read without care, tries something and becomes its name, or "-" and its name."""

    def __init__(self, name: str, **known: object):
        self.words = (
            f"import _thread, fcntl, os, resource, socket\ntry:\n {ATTEMPTS[name]}\n found = {name!r}\n"
            f"except Exception:\n found = {'-' + name!r}",
            known,
        )

    def __reduce__(self):
        return eval, ("(exec({!r}, space := {!r}), space['found'])[1]".format(*self.words),)


@dataclass(frozen=True)
class Target:
    """A home of somebody's, what listens there, and a file that tries everything there is."""

    home: Path
    file: Path

    def worked(self, user: int, *without: str) -> set[str]:
        """The attempts that work when `user` reads the file, with these walls taken out."""
        script = HOLE
        for wall in without:
            assert script.count(WITHOUT[wall][0]) == 1, wall
            script = script.replace(*WITHOUT[wall])
        os.chown(self.home, user or unpickle.NOBODY, -1)
        for path in self.home.iterdir():
            os.chown(path, user or unpickle.NOBODY, -1)
        (self.home / "old").touch()
        reading, writing = os.pipe()
        if (parent := os.fork()) == 0:
            _be(user, script, self.file, writing)
        os.close(writing)
        with open(reading) as pipe:
            told = pipe.read()
        os.waitpid(parent, 0)
        for place in ("/tmp", "/dev/shm"):
            Path(f"{place}/{self.home.name}-planted").unlink(missing_ok=True)
        names = json.loads(told.splitlines()[-1])["left_out"]
        assert len(names) == len(ATTEMPTS), told
        return {name for name in names if not name.startswith("-")}


def _be(user: int, script: str, file: Path, writing: int) -> None:
    """Become `user` and read the file in a child of one's own, as `convert` does."""
    source, target = os.open(file, os.O_RDONLY), os.open(os.devnull, os.O_WRONLY)
    if user != os.getuid():
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    if (child := os.fork()) == 0:
        space: dict = {"__name__": "planted"}
        try:
            with redirect_stdout(io.StringIO()) as said:
                exec(script, space)
                space["os"].fsync = lambda _: None
                space["main"](source, target, unconfined=True)
            os.write(writing, said.getvalue().encode())
        except BaseException:
            os.write(writing, traceback.format_exc().encode())
        os._exit(0)
    os.waitpid(child, 0)
    os._exit(0)


@pytest.fixture(scope="module")
def target() -> Generator[Target, None, None]:
    home = Path(tempfile.mkdtemp(dir="/tmp"))
    home.chmod(0o755)
    for name in ("notes", "old", ".bashrc"):
        (home / name).touch(0o644)
    local = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    with local[0] as named, local[1] as abstract, socket.create_server(("127.0.0.1", 0)) as tcp:
        named.bind(str(home / "socket"))
        (home / "socket").chmod(0o777)
        abstract.bind(f"\0{home}")
        named.listen(50)
        abstract.listen(50)
        known = {"home": str(home), "port": tcp.getsockname()[1], "mark": f"/{home.name}-planted"}
        torch.save({"w": torch.zeros(2)} | {Attempt(name, **known): 1 for name in ATTEMPTS}, home / "attack.pt")
        yield Target(home, home / "attack.pt")
    shutil.rmtree(home)


HEADERS = [Path("/usr/include", name) for name in ("x86_64-linux-gnu/asm/unistd_64.h", "asm-generic/unistd.h")]


@pytest.mark.parametrize("machine", range(2), ids=list(unpickle.MACHINES))
def test_numbers_of_system_calls_are_those_of_the_kernels_headers(machine):
    if not HEADERS[machine].is_file():
        pytest.skip(f"{HEADERS[machine]} is not here")
    defined = re.findall(r"define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text())
    known = {name: both[machine] for name, both in unpickle.ALLOWED.items()}
    assert known == {name: int(number) for name, number in defined if name in known}


def filters() -> bool:
    known = platform.system() == "Linux" and platform.machine() in unpickle.MACHINES
    return known and Path("/proc/sys/kernel/seccomp").is_dir()


def landlock_abi() -> int:
    return max(0, unpickle._syscall(unpickle.LANDLOCK_CREATE_RULESET, 0, 0, 1)) if platform.system() == "Linux" else 0


needs_filter = pytest.mark.skipif(not filters(), reason=f"no seccomp filter for {KERNEL}: convert refuses to read there")


@pytest.mark.parametrize("user", USERS)
def test_control_without_walls_the_attempts_work(target, user):
    found = target.worked(user, "filter", "Landlock", "namespace")
    assert found == ATTEMPTS.keys() - STARTS - (OTHERS if user == 0 else set())


@needs_filter
@pytest.mark.parametrize("without", [(), ("Landlock", "namespace")], ids=["all walls", "the filter alone"])
@pytest.mark.parametrize("user", USERS)
def test_a_hole_gives_nothing_to_a_pickle(target, user, without):
    assert target.worked(user, *without) == set()


@pytest.mark.skipif(landlock_abi() < 6, reason=f"Landlock of {KERNEL} has ABI {landlock_abi()}: signals are its since 6")
@pytest.mark.parametrize("user", USERS)
def test_landlock_alone_holds_files_tcp_abstract_sockets_and_signals_and_no_more(target, user):
    found = target.worked(user, "filter", "namespace")
    assert found == {"stat", "chmod", "unix", "owner"} | ({"limit"} if user else set())


@pytest.fixture
def pickled(tmp_path) -> Path:
    torch.save({"w": torch.arange(3.0)}, tmp_path / "old.bin")
    return tmp_path / "old.bin"


@pytest.fixture
def no_filter(tmp_path, monkeypatch) -> None:
    """A kernel without seccomp, to the process that reads."""
    script = Path(unpickle.__file__).read_text()
    (tmp_path / "unpickle.py").write_text(script.replace(*WITHOUT["filter"]).replace('"aarch64": (', '"another": ('))
    monkeypatch.setattr(unpickle, "__file__", str(tmp_path / "unpickle.py"))


def test_where_the_kernel_takes_no_filter_a_file_is_refused_in_one_sentence(pickled, no_filter, tmp_path, capsys):
    assert main(["convert", str(pickled), str(tmp_path / "out")]) == 2
    assert "no seccomp filter is known for" in (said := capsys.readouterr().err) and "--unconfined" in said
    assert not (tmp_path / "out").exists()


def test_unconfined_reads_it_all_the_same_and_warns(pickled, no_filter, tmp_path, capsys):
    assert main(["convert", str(pickled), str(tmp_path / "out"), "--unconfined"]) == 0
    assert "warning: without a seccomp filter" in capsys.readouterr().out


@needs_filter
def test_a_filter_is_the_wall_that_a_conversion_tells(pickled, tmp_path, capsys):
    assert main(["convert", str(pickled), str(tmp_path / "out"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["confined_by"]
    assert "seccomp filter" in told and (f"Landlock (ABI {landlock_abi()})" in told) is (landlock_abi() > 0)
