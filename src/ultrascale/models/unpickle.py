"""The process that reads one foreign pickle and writes its tensors as safetensors; the only place where torch.load is called.

A pickle is a program. `weights_only=True` runs a small part of that language only, and has had holes (CVE-2025-32434,
CVE-2026-24747), so the process gives away what it does not need before it reads a byte: the network (a namespace of its own,
where the kernel allows), privileges (nobody, if it was root; none to be gained again), and all but bounded memory, time, files
and processes. It is given two open files and imports nothing of ours. Started by `models.convert`; it says in JSON what it did.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import re
import resource
import sys
from pathlib import Path
from typing import Any

CLONE_NEWUSER, CLONE_NEWNET, PR_SET_NO_NEW_PRIVS = 0x10000000, 0x40000000, 38
NOBODY = 65534
SPARE_BYTES = 1 << 30
"""Beside four times the file: its bytes, its tensors, their copy, and the file that is written."""
CPU_SECONDS = 3600
WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
"""Keys that trainers put the weights behind."""


def main(source: int, target: int) -> None:
    """Read the pickle in the open file `source`, write safetensors into `target`, and print what was done."""
    given_up = ["network"] if leave_network() else []
    import torch
    from safetensors.torch import save

    torch.set_num_threads(1)
    tiny = io.BytesIO()
    torch.save({"warm": torch.zeros(1)}, tiny)
    torch.load(io.BytesIO(tiny.getvalue()), weights_only=True)  # what it imports must be imported while files can be opened
    given_up += give_up(os.fstat(source).st_size)
    with os.fdopen(source, "rb") as file:
        content = torch.load(file, map_location="cpu", weights_only=True)
    tensors, left_out = weights_of(content, torch.Tensor)
    if odd := [name for name, tensor in tensors.items() if tensor.layout != torch.strided or tensor.is_quantized]:
        raise ValueError(f"{', '.join(odd[:5])}: sparse or quantized")
    data = save({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"})
    at = 0
    while at < len(data):
        at += os.write(target, data[at : at + (1 << 24)])
    os.fsync(target)
    print(json.dumps({"tensors": len(tensors), "left_out": left_out[:20], "given_up": given_up}))


def leave_network() -> bool:
    """Move into a network namespace without a device; whether that worked."""
    flags = CLONE_NEWNET if os.getuid() == 0 else CLONE_NEWNET | CLONE_NEWUSER
    try:
        return ctypes.CDLL(None).unshare(flags) == 0
    except (OSError, AttributeError):
        return False


def give_up(size: int) -> list[str]:
    """Drop privileges and set limits for a file of so many bytes; what was given up, in words."""
    done = []
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        done.append("root")
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        done.append("new privileges")
    taken = (
        int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if sys.platform == "linux" else 1 << 34
    )
    limits = {
        resource.RLIMIT_AS: taken + 4 * size + SPARE_BYTES, resource.RLIMIT_CPU: CPU_SECONDS, resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 2 * size + (1 << 20), resource.RLIMIT_NPROC: 0,
    }  # fmt: skip
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    return [*done, "memory, time and files beyond a limit"]


def weights_of(content: Any, kind: type) -> tuple[dict[str, Any], list[str]]:
    """The tensors by name, and the names of what else was there. Raises ValueError if there are none."""
    while isinstance(content, dict) and (inner := next((k for k in WRAPPERS if isinstance(content.get(k), dict)), None)):
        content = content[inner]
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not tensors by name")
    tensors = {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, kind)}
    if not tensors:
        raise ValueError("it holds no tensor by name")
    return tensors, [str(name)[:80] for name in content if name not in tensors]


def reason(error: BaseException) -> str:
    """Why a file is refused. Torch's own words advise to read it without care, so of those only what it met is told."""
    text = str(error)
    if "weights_only" not in text:
        return text[:1000]
    met = re.search(r"unsupported (?:global|class|operand)[^,;()\n]{0,80}", text, re.IGNORECASE)
    return f"it holds more than tensors by name{f' ({met[0].strip()})' if met else ''}"


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]))
    except BaseException as error:
        print(json.dumps({"error": f"{type(error).__name__}: {reason(error)}"}))
        raise SystemExit(1) from None
