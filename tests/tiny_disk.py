"""A real disk of 256 KiB, where one may be mounted: in a namespace of its own, so that it goes with the process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


def on_a_tiny_disk(folder: Path, code: str, *, seconds: float = 120.0) -> str | None:
    """What Python prints that runs `code` while a file system of 256 KiB is at `folder`; None where that may not be mounted."""
    mount = f'mount -t tmpfs -o size=256k tiny "{folder}" && exec "{sys.executable}" -c "$0"'
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, code]
    if shutil.which("unshare") is None or subprocess.run([*words[:4], "true"], capture_output=True).returncode:
        return None
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=seconds)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def fill(folder: Path) -> None:
    """Leave no room on the disk at `folder`."""
    with open(folder / "filling", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return
