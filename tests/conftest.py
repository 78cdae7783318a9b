"""Which tests are collected, and the results of those that cover rows of the catalogue of faults.

`gpu`: only where there is a CUDA device. `nightly`: only with ULTRASCALE_NIGHTLY=1. `draws`: always, and at night once more.
"""

import ultrascale.garbage.rarely  # noqa: F401  # while torch is imported and all tests are collected: an eighth of that time

# isort: split
import gc
import os
import signal
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # FSDP2 and optimizers of several groups load it at first use: a second, here once and not on every rank
from catalogue.table import find_tests, write_results, write_whole_run
from hypothesis import HealthCheck, settings
from stand_ins import (  # noqa: F401
    clock_of,
    compiled_by,
    cpu_as_cuda,
    figures,
    forks_here,
    kernel_seconds,
    known_peak,
    temporary_folder,
)

from ultrascale.garbage import collect_as_usual

# pytest-xdist sets it for its workers, where lines would be cut to it.
os.environ.pop("COLUMNS", None)

# Ranks are forked, and a child has the compiler's pool of processes without the thread that reads from it: it would hang.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Ranks of tests are forks, which must not meet a pool of threads of this process: they would wait for it. Bits are compared.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))

# Torch built for CUDA starts a thread for each GPU at the first backward pass, and then forks cannot compute. Where none is,
# FakeTensorMode (of a trace, of the compiler) makes up eight: the first pass comes before it.
if not torch.cuda.is_available():
    torch.ones(1, requires_grad=True).sum().backward()

# On CUDA torch asks for it once, at the first product of a process, and `deterministic = true` then wants it to be there.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Under nohup it is ignored, and so by every process that tests start, which are to save and leave when it comes.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How long an example takes, or drawing it, tells of the machine and of what else it does. Examples are those of the test's own
# text, and others every night: one in thousands that fails is not to be found by whoever changes something else.
settings.register_profile(
    "any machine", deadline=None, derandomize=os.environ.get("ULTRASCALE_NIGHTLY") != "1", database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.load_profile("any machine")

# A run that is trained here leaves its handlers: where a process ends with it, a late signal is to kill nobody.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

ROOT = Path(__file__).parent
STARTED = time.monotonic()
RECORDED: dict[str, dict[str, Any]] = {}


@pytest.fixture(autouse=True)
def as_handled_before() -> Generator[None, None, None]:
    """Handlers of signals are those of the tests before, whatever a test leaves."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:  # None: somebody else's, in C
            signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-catalogue", action="store_true", help="note results of the tests of the catalogue of faults")


def pytest_itemcollected(item: pytest.Item) -> None:
    if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        item.add_marker("draws")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [] if torch.cuda.is_available() else [item for item in items if item.get_closest_marker("gpu")]
    if os.environ.get("ULTRASCALE_NIGHTLY") != "1":
        left_out += [item for item in items if item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=left_out)
    out = set(left_out)
    items[:] = [item for item in items if item not in out]
    if hasattr(config, "workerinput"):  # of several workers none is to begin a long file when the others are done
        place = {line: number for number, line in enumerate((ROOT / "long_files.txt").read_text().splitlines())}
        items.sort(key=lambda item: place.get(item.path.relative_to(ROOT).as_posix(), len(place)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Nine thousand tests and all modules stay: looking for garbage among them takes a third of a second each time."""
    gc.collect()
    gc.freeze()
    collect_as_usual()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _counted(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _counted(item))


def _counted(item: pytest.Item) -> Generator[None, Any, Any]:
    """Count the time of processors, with that of processes that were started and waited for: it depends less than a duration on
    what else the machine does."""
    before = sum(os.times()[:4])
    try:
        return (yield)
    finally:
        item.user_properties.append(("processor", sum(os.times()[:4]) - before))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    name, today = report.nodeid.removeprefix("tests/").partition("[")[0], time.strftime("%Y-%m-%d")
    one = RECORDED.setdefault(name, {"result": "passed", "cases": 0, "seconds": 0.0, "processor": 0.0, "on": today})
    one["cases"] += 1
    one["seconds"] = round(one["seconds"] + report.duration, 1)
    used = sum(float(str(value)) for key, value in report.user_properties if key == "processor")
    one["processor"] = round(one["processor"] + used, 2)
    if not report.passed:
        one["result"] = report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()  # or libraries tell of what they take for leaks
    if session.config.getoption("--record-catalogue") and not hasattr(session.config, "workerinput"):
        of_catalogue = {test.name for test in find_tests()}
        found = {name: one for name, one in RECORDED.items() if name in of_catalogue}
        write_results(found)
        if _is_whole(session.config):
            write_whole_run(
                minutes=(time.monotonic() - STARTED) / 60,
                cases=sum(one["cases"] for one in found.values()),
                workers=session.config.getoption("numprocesses", None) or 1,
                load=os.getloadavg()[2],
                on=time.strftime("%Y-%m-%d"),
            )


def _is_whole(config: pytest.Config) -> bool:
    """Whether all tests of the catalogue that CI runs were asked for, and no others."""
    narrowed = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or config.option.keyword
    return config.option.markexpr == "catalogue" and not narrowed and os.environ.get("ULTRASCALE_NIGHTLY") != "1"
