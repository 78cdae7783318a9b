"""Nothing that a user's file or an argument says is executed, nothing is fetched, no port is opened; read off the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tidy.sources import MODULES, PACKAGE, parsed, short

READS_PICKLES = {PACKAGE / "models" / "files" / "unpickle.py": {"torch.load()", "torch.save()"}}
"""The confined process of `ultrascale convert`, and what it may call; see docs/security.md."""
ALLOWED = READS_PICKLES | {
    PACKAGE / "check" / "oracle" / "gathered.py": {"dist.gather_object()"},
    PACKAGE / "check" / "oracle" / "transformers_loop.py": {".from_pretrained()"},
    PACKAGE / "demo" / "stages" / "exported.py": {".from_pretrained()"},
    PACKAGE / "models" / "hub.py": {"huggingface_hub"},
    PACKAGE / "page" / "server.py": {"http.server"},
    PACKAGE / "storage" / "hub.py": {"huggingface_hub"},
}
"""Also: the Hub is sent to by `export --push-to-hub`, read as bytes at one commit by hf://, and written where a run or a sweep
is kept there (`storage/hub_branch.py`, by the same import); the page is served, to whoever has its token and on this machine
alone (`tests/page/test_server.py`); forked ranks of a proof hand each other what they made; the demo and a proof let
transformers read our own export."""
UNSAFE_MODULES = {
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml", "ruamel", "jsonpickle",
    "code", "codeop", "runpy", "xmlrpc", "imp", "zipimport",
}  # fmt: skip
WRITES = {"dumps"}
"""What of them reads nothing."""
SERVING_MODULES = {"http", "socketserver", "wsgiref", "asyncio", "uvicorn", "flask", "fastapi", "aiohttp", "tornado"}
FETCHING_MODULES = {"urllib", "requests", "httpx", "ftplib", "huggingface_hub", "datasets", "smtplib", "telnetlib"}
UNSAFE_CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "np.load",
    "numpy.load", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "yaml.load",
    "yaml.unsafe_load", "pd.read_pickle", "dist.broadcast_object_list", "dist.all_gather_object", "dist.gather_object",
    "dist.scatter_object_list", "dist.send_object_list", "dist.recv_object_list", "shutil.unpack_archive", "np.fromregex",
}  # fmt: skip
UNSAFE_METHODS = {"extractall", "bind", "listen", "from_pretrained", "set_start_method"}
UNSAFE_ARGUMENTS = {"shell": False, "trust_remote_code": False, "allow_pickle": False, "weights_only": True}
"""Arguments, and the only value that they may have."""


def unsafe_places(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of everything that can run code found in a file or an argument, fetch something or serve something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if _is_unsafe_module(alias.name))
        elif isinstance(node, ast.ImportFrom) and _is_unsafe_module(node.module or ""):
            if {alias.name for alias in node.names} - WRITES:
                yield node.lineno, node.module or ""
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, what) for what in _unsafe_call(node))


def _is_unsafe_module(name: str) -> bool:
    return name.split(".")[0] in UNSAFE_MODULES | SERVING_MODULES | FETCHING_MODULES


def _unsafe_call(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    if name in UNSAFE_CALLS:
        yield f"{name}()"
    elif isinstance(node.func, ast.Attribute) and node.func.attr in UNSAFE_METHODS:
        yield f".{node.func.attr}()"
    for keyword in node.keywords:
        if keyword.arg in UNSAFE_ARGUMENTS and not _is(keyword.value, UNSAFE_ARGUMENTS[keyword.arg]):
            yield f"{keyword.arg}="
    if name == "torch.load" and not any(keyword.arg == "weights_only" for keyword in node.keywords):
        yield "torch.load() without weights_only"


def _is(node: ast.expr, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from pickle import loads", "torch.save(p)", "eval(t)", "run(c, shell=True)", "f(trust_remote_code=x)",
     "import http.server", "from urllib import request", "s.bind(a)", "m.from_pretrained(n)", "f(p, weights_only=False)",
     "dist.all_gather_object(a, b)", "archive.extractall()", "import yaml", "__import__(n)"],
)  # fmt: skip
def test_the_search_for_unsafe_calls_finds(line):
    assert len(list(unsafe_places(ast.parse(line)))) == 1


def test_torch_load_is_seen_with_and_without_its_argument():
    assert [what for _, what in unsafe_places(ast.parse("torch.load(f)"))] == [
        "torch.load()",
        "torch.load() without weights_only",
    ]
    assert [what for _, what in unsafe_places(ast.parse("torch.load(f, weights_only=True)"))] == ["torch.load()"]


def test_nothing_can_run_code_found_in_a_file():
    found = [
        f"{short(path)}:{line} {what}"
        for path in MODULES
        for line, what in unsafe_places(parsed(path))
        if what not in ALLOWED.get(path, ())
    ]
    assert found == []


def imports(path: Path) -> list[ast.ImportFrom]:
    return [node for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom)]


def test_the_process_that_reads_pickles_imports_nothing_of_ours_and_is_only_started():
    for path in READS_PICKLES:
        ours = [
            n for n in ast.walk(parsed(path)) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("ultrascale")
        ]
        assert ours == []
        users = [short(other) for other in MODULES if path.stem in {a.name for node in imports(other) for a in node.names}]
        assert users == ["src/ultrascale/models/files/convert.py"]


def test_every_process_is_started_from_a_list_of_words():
    """`subprocess.run(text)` would go to no shell, but split nothing either: a list says what is a word."""
    starts = re.compile(r"subprocess\.(run|Popen|call|check_call|check_output)")
    wrong = [
        f"{short(path)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and starts.fullmatch(ast.unparse(node.func))
        if node.args and isinstance(node.args[0], ast.Constant | ast.JoinedStr)
    ]
    assert wrong == []


def test_no_variable_of_the_environment_is_written_out_as_a_whole():
    """Tokens and keys live there. Copies for a child process are fine; dumps, prints and iterations are not."""
    wrong = [
        f"{short(path)}:{node.lineno} {ast.unparse(node)[:80]}"
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.dumps", "print", "repr", "str", "write_json", "dict")
        if any(ast.unparse(argument) in ("os.environ", "dict(os.environ)") for argument in node.args)
    ]
    assert wrong == []
