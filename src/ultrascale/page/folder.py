"""The page as static files that plan inside the browser: CPython of Pyodide in a Web Worker.

    pyodide.asm.*   the interpreter, from npm's pyodide; the WebAssembly is gzipped, and the worker unpacks it
    stdlib.zip      its standard library
    site.zip        NumPy, from emscripten-forge's npm package; this package; its dependencies, as they are installed here

NumPy has no wheel for Pyodide on PyPI. emscripten-forge builds it with the compiler of Pyodide 0.24, Emscripten 3.1.45, for the
same Python, so that it can be loaded there. Its one missing function is `backtrace`, with which NumPy decides whether memory of
temporaries may be reused; the substitute here finds no frames.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import py_compile
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import metadata, resources
from pathlib import Path

from ultrascale.description.problems import mistake
from ultrascale.page.controls import controls_json
from ultrascale.page.server import static_text
from ultrascale.storage.location import obstacle

PACKAGES = {
    "pyodide@0.24.1": (
        "pyodide-0.24.1.tgz",
        "7e436894dc22bf8d44d8a2823f66e05be770afde41fb42920bf586f560a695633d30d15b4555f4ac5f62e0e8a444cefc6c679552f2dd549c3c8d8d7bc312a845",
    ),
    "@emscripten-forge/numpy@2.1.1-py311hc8e14bb-0": (
        "emscripten-forge-numpy-2.1.1-py311hc8e14bb-0.tgz",
        "54f9d283e46e402f73cf46e7073cc8fe6695ca892e6d28322ac7d2aafb3368bb65c91498f8b76d9805298d9f4d944a42dd2592608df48d65d8ea1ad35355e2ac",
    ),
}
"""npm packages, with the files that `npm pack` creates and their SHA-512."""
NPM_SECONDS = 600
PYTHON = (3, 11)
"""Version of this Pyodide's Python."""
SITE = "/lib/python3.11/site-packages/"
RUNTIME = ("pyodide.mjs", "pyodide.asm.js", "pyodide.asm.wasm", "python_stdlib.zip")
IMPORTS = "wasmImports={"
"""Beginning of the list of functions that WebAssembly may call."""
EXCLUDED_NUMPY = {"tests", "f2py", "testing", "distutils", "_pyinstaller", "include", "doc"}
TRAINING_PACKAGES = {
    "check", "checkpoint", "data", "demo", "islands", "jobs", "kernels", "measure", "models", "parallel", "primer", "soak",
    "sweep", "trackers", "train", "validation",
}  # fmt: skip
"""Folders of this package that no plan needs."""
EXCLUDED_DEPENDENCIES = {"numpy", "pygments", "markdown-it-py", "mdurl"}
"""Dependencies that come from elsewhere, or that only coloured text needs."""
REQUIRED = re.compile(r"[\w.-]+")
LOADED = re.compile(r'(?<=[ =])"((?:\./)?\w+\.(?:css|js|mjs))"')
"""Names of files that the page and the worker load: in a build they change, so that a browser does not use cached older
ones."""
STATIC = ("page.css", "charts.js", "page.js", "browser.js", "worker.mjs")


def build(folder: Path, parts: Path | None) -> str:
    """Write the page into `folder`; returns a summary of what was written.

    `parts`: a folder with both files of `PACKAGES`; None: `npm pack` fetches them. Raises SpecError if they are unavailable or
    differ, or if the folder is not empty or cannot be written.
    """
    remedy = "Name a folder that is not there yet."
    if obstructed := obstacle(folder):
        raise mistake("--build", f"{obstructed} is no folder that can be written", remedy)
    if folder.is_dir() and any(folder.iterdir()):
        raise mistake("--build", f"{folder} is not an empty folder", remedy)
    with tempfile.TemporaryDirectory() as scratch:
        runtime, numpy = _checked(parts, "--parts") if parts else _checked(_packed(Path(scratch)), "--build")
        folder.mkdir(parents=True, exist_ok=True)
        _write_runtime(folder, runtime)
        _write_zip(folder / "site.zip", [*_numpy(numpy), *_package_files(), *_dependencies()])
    for name in STATIC:
        (folder / name).write_text(static_text(name), encoding="utf-8")
    page = static_text("index.html").replace("server.js", "browser.js")
    (folder / "index.html").write_text(page, encoding="utf-8")
    build_digest = digest(folder)
    for name in ("index.html", "worker.mjs"):
        text = LOADED.sub(rf'"\1?{build_digest}"', (folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "controls.json").write_text(json.dumps(controls_json() | {"build": build_digest}), encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    slow = "" if _compiles() else " Built by Python 3.11 it would start faster."
    return f"wrote {folder}: {size / 1e6:.1f} MB. Serve it with any web server, such as python -m http.server -d {folder}{slow}"


def digest(folder: Path) -> str:
    """Digest of every file of `folder`, so that answers cached by a browser belong to one build."""
    combined = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        combined.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return combined.hexdigest()[:16]


def _packed(folder: Path) -> Path:
    """Both npm packages, fetched into `folder`."""
    words = ["npm", "pack", "--loglevel=error", "--pack-destination", str(folder), *PACKAGES]
    by_hand = f"Where there is npm and a network: npm pack {' '.join(PACKAGES)}; then --parts with the folder that has both."
    if shutil.which("npm") is None:
        raise mistake("--build", "needs npm, which is not installed, for Pyodide and NumPy", by_hand)
    print("npm fetches Pyodide and NumPy, 11 MB.", file=sys.stderr)
    try:
        done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=NPM_SECONDS)
        npm_lines = [line for line in done.stderr.splitlines() if line.startswith("npm")]
        why = "; ".join(npm_lines[:2]) or f"it ended with exit status {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        why = f"it had not ended after {NPM_SECONDS} s"
    if why:
        raise mistake("--build", f"npm could not fetch Pyodide and NumPy: {why}", by_hand)
    return folder


def _checked(parts: Path, key: str) -> list[bytes]:
    """Files of both npm packages. Raises SpecError about `key` if one is missing or differs."""
    packages = []
    for package, (name, digest) in PACKAGES.items():
        remedy = f"npm pack {package} makes it."
        if not (parts / name).is_file():
            raise mistake(key, f"{parts} has no {name}", remedy)
        packages.append((parts / name).read_bytes())
        if hashlib.sha512(packages[-1]).hexdigest() != digest:
            raise mistake(key, f"{parts / name} is not what was published under that name", remedy)
    return packages


def _write_runtime(folder: Path, packed: bytes) -> None:
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        loader, code, machine, library = (files.extractfile(f"package/{name}").read() for name in RUNTIME)  # type: ignore[union-attr]
    (folder / "pyodide.mjs").write_bytes(loader)
    text = code.decode()
    assert text.count(IMPORTS) == 1
    (folder / "pyodide.asm.js").write_text(text.replace(IMPORTS, f"{IMPORTS}backtrace:()=>0,"), encoding="utf-8")
    (folder / "pyodide.asm.wasm.packed").write_bytes(gzip.compress(machine, mtime=0))
    with zipfile.ZipFile(io.BytesIO(library)) as stored:
        _write_zip(folder / "stdlib.zip", [(name, stored.read(name)) for name in stored.namelist()], base="/lib/python311.zip/")
    info = {"arch": "wasm32", "platform": "emscripten_3_1_45", "version": "0.24.1", "python": "3.11.3"}
    (folder / "pyodide-lock.json").write_text(json.dumps({"info": info, "packages": {}}), encoding="utf-8")


def _numpy(packed: bytes) -> Iterator[tuple[str, bytes]]:
    """Files of the package, which is a conda package inside an npm package."""
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        inner = next(member for member in files.getmembers() if member.name.endswith(".tar.gz"))
        conda = files.extractfile(inner).read()  # type: ignore[union-attr]
    prefix = SITE.removeprefix("/")
    with tarfile.open(fileobj=io.BytesIO(conda)) as files:
        for member in files.getmembers():
            name = member.name.removeprefix(prefix)
            if (
                member.isfile()
                and name.startswith("numpy/")
                and not EXCLUDED_NUMPY & {*name.split("/")}
                and not name.endswith(".pyi")
            ):
                yield name, files.extractfile(member).read()  # type: ignore[union-attr]


def _package_files() -> Iterator[tuple[str, bytes]]:
    """Files of this package that the planner needs, and those with its version."""
    root = Path(str(resources.files("ultrascale")))
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if (
            path.is_file()
            and parts[0] not in TRAINING_PACKAGES
            and "__pycache__" not in parts
            and parts[:2] != ("page", "static")
        ):
            yield f"ultrascale/{'/'.join(parts)}", path.read_bytes()


def _dependencies() -> Iterator[tuple[str, bytes]]:
    """Python files of all dependencies of this package without extras, as installed here."""
    waiting, seen = ["ultrascale"], set(EXCLUDED_DEPENDENCIES)
    while waiting:
        distribution = metadata.distribution(waiting.pop())
        for text in distribution.requires or []:
            name, marker = re.sub("[-_.]+", "-", REQUIRED.match(text)[0]).lower(), text.partition(";")[2]  # type: ignore[index]
            if name not in seen and "extra" not in marker and _is_installed(name):
                seen.add(name)
                waiting.append(name)
                for file in metadata.distribution(name).files or []:
                    if file.suffix == ".py":
                        yield str(file), Path(str(file.locate())).read_bytes()


def _is_installed(name: str) -> bool:
    """True if a dependency is installed: one for another Python or system is not."""
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _compiles() -> bool:
    return sys.version_info[:2] == PYTHON


def _write_zip(path: Path, files: list[tuple[str, bytes]], base: str = SITE) -> None:
    """Write files by name; those of Python compiled, if this Python is the page's."""
    with zipfile.ZipFile(path, "w") as out:
        for name, data in files:
            if name.endswith(".py") and _compiles():
                name, data = name + "c", _compiled(data, base + name)
            out.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED, compresslevel=9)


def _compiled(source: bytes, place: str) -> bytes:
    """Bytecode of a module, with `place` as its path."""
    with tempfile.TemporaryDirectory() as scratch:
        module, compiled = Path(scratch, "module.py"), Path(scratch, "module.pyc")
        module.write_bytes(source)
        unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(module), str(compiled), place, doraise=True, invalidation_mode=unchecked)
        return compiled.read_bytes()
