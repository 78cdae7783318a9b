"""`import ultrascale` costs milliseconds, and nothing is imported before it is used."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

from write_stub import FILE, text

import ultrascale as us
from ultrascale.api.planning.plan_request import PlanOptions

PACKAGE = Path(us.__file__).parent
LARGE = ("torch", "numpy", "rich", "tyro", "matplotlib", "pandas")


def in_a_process_of_its_own(code: str) -> dict:
    """What `code` prints as JSON."""
    done = subprocess.run([sys.executable, "-c", f"import json, sys, time\n{code}"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_package_alone_is_imported_in_less_than_a_tenth_of_a_second():
    code = f"""
started = time.process_time()
import ultrascale
spent = time.process_time() - started
print(json.dumps([spent, [name for name in {LARGE} if name in sys.modules]]))"""
    found = [in_a_process_of_its_own(code) for _ in range(3)]
    assert min(spent for spent, _ in found) < 0.1
    assert [large for _, large in found] == [[], [], []]


def test_plans_and_schedules_need_no_torch():
    code = """
import ultrascale as us
us.plan("tiny-llama", "2xcpu")
us.schedule("1f1b"), us.search("tiny-llama", "8xh100", pp=1)
print(json.dumps({"torch": "torch" in sys.modules}))"""
    assert in_a_process_of_its_own(code) == {"torch": False}


def test_a_verb_that_is_a_package_too_is_called_and_imported():
    code = """
import ultrascale as us
import ultrascale.plan.report as report
from ultrascale import plan, trace
import ultrascale.trace.recording.record
called = [repr(plan("tiny-llama", "2xcpu")), repr(us.plan("tiny-llama", "2xcpu"))]
verbs = [callable(us.check), callable(trace)]
print(json.dumps({"called": len(set(called)), "module": us.plan.report is report, "verbs": verbs}))"""
    assert in_a_process_of_its_own(code) == {"called": 1, "module": True, "verbs": [True, True]}


def test_every_public_name_is_there_and_in_the_stub():
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    typed = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)} | {"SpecError", "__version__"}
    assert typed == set(us.__all__) and set(us.__all__) <= set(dir(us))
    assert all(callable(getattr(us, name)) for name in typed - {"__version__"})
    assert (PACKAGE / "py.typed").exists()


def test_the_stub_is_what_the_options_of_the_verbs_make():
    assert FILE.read_text() == text(), "write it anew: python .ci/write_stub.py"


def test_a_default_in_the_stub_is_the_command_line_s():
    plan = next(node for node in ast.parse(FILE.read_text()).body if isinstance(node, ast.FunctionDef) and node.name == "plan")
    defaults = zip([one.arg for one in plan.args.kwonlyargs], plan.args.kw_defaults, strict=True)
    told = {name: ast.literal_eval(default) for name, default in defaults if default is not None}
    own = {
        name: value
        for name, value in vars(PlanOptions()).items()
        if name not in ("run", "model", "gpus", "json", "brief", "compare")
    }
    assert told == own


def test_signatures_and_words_are_those_of_the_functions():
    assert list(inspect.signature(us.plan).parameters) == ["model", "gpus", "seq_len", "tokens_per_batch", "settings"]
    for name in ("search", "compare", "schedule", "report"):
        assert inspect.getdoc(getattr(us, name))
    assert (inspect.getdoc(us.plan) or "").startswith("Find the best layout of a model on machines")
    assert (inspect.getdoc(us.check) or "").startswith("Prove that")


def test_a_name_that_is_not_there_is_an_attribute_error():
    assert not hasattr(us, "plans")
