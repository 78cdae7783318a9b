"""Write the dependencies of `.[test,lint]`, with versions and hashes, as pip resolves them on this machine.

    .venv/bin/python .ci/write_lock.py > locks/py311.txt
    pip install --require-hashes --requirement locks/py311.txt

Nothing is installed or downloaded but descriptions; the file names no index.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIP = ["-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        subprocess.run([sys.executable, *PIP, str(report), f"{ROOT}[test,lint]"], check=True, stdout=subprocess.DEVNULL)
        print(lock(json.loads(report.read_text())), end="")


def lock(report: dict) -> str:
    """The lock file of pip's report: a package a line, by name, each with the sha256 of the file that pip chose."""
    lines = []
    for one in report["install"]:
        name = re.sub(r"[-_.]+", "-", one["metadata"]["name"]).lower()
        digest = one["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if name != "ultrascale":
            assert digest, f"{name} has no hash"
            lines.append(f"{name}=={one['metadata']['version']} --hash=sha256:{digest}")
    version = ".".join(platform.python_version_tuple()[:2])
    where = f"{platform.system()} {platform.machine()}, Python {version}"
    return "\n".join([f"# {where}; written by .ci/write_lock.py", *sorted(lines)]) + "\n"


if __name__ == "__main__":
    main()
