"""Process that reads one foreign pickle and writes its tensors as safetensors; the only place that calls torch.load.

A pickle is a program. `weights_only=True` runs only a small part of that language, and has had holes (CVE-2025-32434,
CVE-2026-24747). So before it reads a byte the process gives up what it does not need: privileges, memory and time beyond a
limit, and every system call that opens a file, connects, starts a process or signals one. That is a seccomp filter; without it
nothing is read unless `unconfined` is set. A network namespace and Landlock add to it where the kernel supports them. The
process gets two open files and imports nothing of ours. `models.files.convert` starts it; it reports in JSON.
"""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import re
import resource
import struct
import sys
from pathlib import Path
from typing import Any

CLONE_NEWUSER, CLONE_NEWNET, PR_SET_NO_NEW_PRIVS = 0x10000000, 0x40000000, 38
NOBODY = 65534
LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF = 444, 446
"""System call numbers, the same on every architecture."""
MACHINES = {"x86_64": (0xC000003E, 317), "aarch64": (0xC00000B7, 277)}
"""AUDIT_ARCH and the number of seccomp(2)."""
ALLOWED = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "pread64": (17, 67), "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233),
    "getpid": (39, 172), "exit": (60, 93), "fsync": (74, 82), "gettid": (186, 178), "futex": (202, 98),
    "clock_gettime": (228, 113), "exit_group": (231, 94), "getrandom": (318, 278),
}  # fmt: skip
"""Allowed system calls, which compute and use open files, by their numbers on x86_64 and aarch64. All others fail with
EPERM."""
SPARE_BYTES = 1 << 30
"""Bytes allowed beyond four times the file's size, for the file's bytes, its tensors, their copy, and the output file."""
CPU_SECONDS = 3600
WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which trainers store the weights."""


def main(source: int, target: int, *, unconfined: bool = False) -> None:
    """Read the pickle in the open file `source`, write safetensors into `target`, and print a report."""
    confined_by = isolate_network()
    import torch
    from safetensors.torch import save

    torch.set_num_threads(1)
    tiny = io.BytesIO()
    torch.save({"warm": torch.zeros(1)}, tiny)
    torch.load(io.BytesIO(tiny.getvalue()), weights_only=True)  # trigger its imports while files can still be opened
    save({"warm": torch.zeros(2, 2).t().clone().contiguous()})
    with os.fdopen(source, "rb") as file:
        confined_by += drop_privileges(os.fstat(source).st_size) + restrict_files()
        try:
            confined_by += restrict_calls()
        except OSError as error:
            if not unconfined:
                raise OSError(f"{error}, and without one it is read with --unconfined only") from None
        content = torch.load(file, map_location="cpu", weights_only=True)
    tensors, left_out = weights_of(content, torch.Tensor)
    if odd := [name for name, tensor in tensors.items() if tensor.layout != torch.strided or tensor.is_quantized]:
        raise ValueError(f"{', '.join(odd[:5])}: sparse or quantized")
    data = save({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"})
    written = 0
    while written < len(data):
        written += os.write(target, data[written : written + (1 << 24)])
    os.fsync(target)
    print(json.dumps({"tensors": len(tensors), "left_out": left_out[:20], "confined_by": confined_by}))


def isolate_network() -> list[str]:
    """Move into an empty network namespace, where the kernel allows it; returns what was done, in words."""
    flags = CLONE_NEWNET if os.getuid() == 0 else CLONE_NEWNET | CLONE_NEWUSER
    try:
        return ["network namespace"] if ctypes.CDLL(None).unshare(flags) == 0 else []
    except (OSError, AttributeError):
        return []


def drop_privileges(size: int) -> list[str]:
    """Drop privileges and set limits for a file of `size` bytes; returns what was done, in words."""
    done = []
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        done.append("user nobody")
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        done.append("no new privileges")
    taken = (
        int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if sys.platform == "linux" else 1 << 34
    )
    limits = {
        resource.RLIMIT_AS: taken + 4 * size + SPARE_BYTES, resource.RLIMIT_CPU: CPU_SECONDS, resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 2 * size + (1 << 20), resource.RLIMIT_NPROC: 0,
    }  # fmt: skip
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    return [*done, "limits of memory and time"]


def restrict_files() -> list[str]:
    """Deny by Landlock all files, and TCP (from ABI 4), signals and abstract sockets (from ABI 6); returns what was done, in
    words."""
    if sys.platform != "linux":
        return []
    abi = _syscall(LANDLOCK_CREATE_RULESET, 0, 0, 1)
    if abi < 1:
        return []
    files = (1 << (13 + (abi >= 2) + (abi >= 3) + (abi >= 5))) - 1  # later ABIs know to refer, truncate and ioctl
    denied = (ctypes.c_uint64 * 3)(files, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    ruleset = _syscall(LANDLOCK_CREATE_RULESET, ctypes.addressof(denied), ctypes.sizeof(denied), 0)
    if ruleset < 0 or _syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0) != 0:
        return []
    os.close(ruleset)
    return [f"Landlock (ABI {abi})"]


def restrict_calls() -> list[str]:
    """Allow no system calls but `ALLOWED`, by a seccomp filter; returns what was done, in words. Raises OSError if that
    fails."""
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in MACHINES:
        raise OSError(f"no seccomp filter is known for {sys.platform} on {machine}")
    architecture, seccomp = MACHINES[machine]
    numbers = [both[list(MACHINES).index(machine)] for both in ALLOWED.values()]
    load, equal, give, allow, kill = 0x20, 0x15, 0x06, 0x7FFF0000, 0x80000000
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0)]
    program += [(equal, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
    program += [(give, 0, 0, 0x00050000 | errno.EPERM), (give, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filter_ = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    if _syscall(seccomp, 1, 1, ctypes.addressof(filter_)) != 0:  # SECCOMP_SET_MODE_FILTER, for all threads
        raise OSError("this kernel takes no seccomp filter")
    return ["seccomp filter"]


def _syscall(*words: int) -> int:
    return ctypes.CDLL(None).syscall(*map(ctypes.c_long, words))


def weights_of(content: Any, kind: type) -> tuple[dict[str, Any], list[str]]:
    """Tensors by name, and the names of other entries. Raises ValueError if there are no tensors."""
    while isinstance(content, dict) and (inner := next((k for k in WRAPPERS if isinstance(content.get(k), dict)), None)):
        content = content[inner]
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not tensors by name")
    tensors = {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, kind)}
    if not tensors:
        raise ValueError("it holds no tensor by name")
    return tensors, [str(name)[:80] for name in content if name not in tensors]


def reason(error: BaseException) -> str:
    """Reason why a file is refused. Torch's message advises to load it unsafely, so only the object it met is reported."""
    text = str(error)
    if "weights_only" not in text:
        return text[:1000]
    met = re.search(r"unsupported (?:global|class|operand)[^,;()\n]{0,80}", text, re.IGNORECASE)
    return f"it holds more than tensors by name{f' ({met[0].strip()})' if met else ''}"


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), unconfined="unconfined" in sys.argv[3:])
    except BaseException as error:
        message = f"{type(error).__name__}: {reason(error)}"
        if isinstance(error, LookupError | EOFError | AttributeError | TypeError | UnicodeError):
            message = f"it is no pickle, or a damaged one ({message})"
        print(json.dumps({"error": message}))
        raise SystemExit(1) from None
