"""Parsers and whole commands under hostile input, in processes that may take little more memory than they have, and little
time.

A parser gives a result or an error of ours, whatever it reads: no traceback, no hang, no memory that grows with a number in the
file. A command ends with an exit code that it documents, and what it prints is no traceback and no flood.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ultrascale.cli.main import main

EXTRA_MIB = 512
SECONDS = 100
COMMAND_MIB, COMMAND_SECONDS, PATIENCE, PRINTED_MIB = 2048, 30, 5, 64
"""Memory, seconds of a processor, how many times as long by the clock (others take their share), and what is written."""
LONGEST_REFUSAL = 50_000
"""Letters of what a command prints that was described wrongly."""
TIMES = int(os.environ.get("ULTRASCALE_FUZZ", "1"))
"""Multiplies the number of examples; at night 20."""


def examples(count: int) -> settings:
    """Settings of a fuzz test of `count` examples in CI."""
    return settings(
        max_examples=count * TIMES, deadline=None, database=None, derandomize=TIMES == 1,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )  # fmt: skip


def confined(work: Callable[..., None], *arguments: Any, seconds: float = SECONDS * TIMES) -> None:
    """Run `work` in a forked process that may take 512 MiB more, and so many seconds. Fails with its traceback."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sending, work, arguments), daemon=True)
    process.start()
    sending.close()
    try:
        said = receiving.recv() if receiving.poll(seconds) else "took too long: a hang"
    except EOFError:
        process.join()
        said = f"the process died with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
    assert said == "", said


def read_confined(
    read: Callable[[bytes], None], data: st.SearchStrategy[bytes], *, count: int, also: Iterable[bytes] = ()
) -> None:
    """Let `read` have `count` examples of `data`, all that is huge, and `also` these, in a process as `confined` makes it."""

    @examples(count)
    @given(data=data)
    def work(data: bytes) -> None:
        read(data)

    def all_of_it() -> None:
        work()
        for odd in (*HUGE, *also):
            read(odd)

    confined(all_of_it)


def _child(sending: Any, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_taken_bytes() + (EXTRA_MIB << 20), resource.RLIM_INFINITY))
    try:
        work(*arguments)
        sending.send("")
    except BaseException as error:
        sending.send(told(error))


def _taken_bytes() -> int:
    """Of address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def told(error: BaseException) -> str:
    """What happened, where in the package, and with what, each in a few lines: a hostile file may be long."""
    if isinstance(error, BaseExceptionGroup):
        return "\n\n".join(told(one) for one in error.exceptions)
    frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    lines = [f"{type(error).__name__}: {str(error)[:400]}", *frames[-12:]]
    return "\n".join([*lines, *(note[:1500] for note in getattr(error, "__notes__", []))])


def sound(parse: Callable[[], Any]) -> Any:
    """What `parse` returns, or None if it raises an error meant for people. Everything else goes through, and fails."""
    try:
        return parse()
    except Exception as error:
        ours = type(error).__module__.split(".")[0] == "ultrascale"
        if ours and str(error).strip():
            return None
        raise


class Ended(NamedTuple):
    """How a command ended."""

    words: tuple[str, ...]
    code: int
    """Its exit code; of one that a signal ended, minus the signal."""
    said: str
    seconds: float
    """Of a processor."""
    extra_mib: float
    """The most memory it had beyond that of the fork when it began."""

    @property
    def wrong(self) -> str:
        """What is wrong with that, in a word; empty if nothing is."""
        if self.code < 0:
            return "hang" if -self.code in (signal.SIGALRM, signal.SIGXCPU) else f"ended by signal {-self.code}"
        if self.code not in (0, 1, 2) or "Traceback (most recent call last)" in self.said:
            return "traceback"
        if self.code and not self.said.strip():
            return "no word"
        return "flood" if self.code == 2 and len(self.said) > LONGEST_REFUSAL else ""


def command(
    words: Sequence[str], folder: Path, *, run: Callable[[list[str]], Any] = main, seconds: int = COMMAND_SECONDS
) -> Ended:
    """How `ultrascale WORDS` ends in `folder`, in a fork of this process: what is imported here already costs nothing. It may
    take so many seconds of a processor."""
    printed, begun = folder / "printed.txt", folder / "begun.txt"
    child = os.fork()
    if child == 0:
        _be_the_command(words, folder, printed, begun, run, seconds)
    _, status, used = os.wait4(child, 0)
    said, extra = printed.read_text(errors="replace"), used.ru_maxrss / 1024 - float(begun.read_text())
    return Ended((*words,), os.waitstatus_to_exitcode(status), said, used.ru_utime + used.ru_stime, extra)


def _be_the_command(
    words: Sequence[str], folder: Path, printed: Path, begun: Path, run: Callable[[list[str]], Any], seconds: int
) -> None:
    code = 70
    try:
        begun.write_text(str(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20))
        os.chdir(folder)
        out, null = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), os.open(os.devnull, os.O_RDONLY)
        for stream, number in ((null, 0), (out, 1), (out, 2)):
            os.dup2(stream, number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_AS, (_taken_bytes() + (COMMAND_MIB << 20), resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (PRINTED_MIB << 20, resource.RLIM_INFINITY))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        signal.alarm(PATIENCE * seconds)
        code = run([*words])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Figures:
    """Counts commands and collects those that ended wrongly."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.codes: Counter[int] = Counter()
        self.wrong: list[Ended] = []
        self.seconds = self.extra_mib = 0.0

    def run(self, *words: str) -> None:
        """`ultrascale WORDS`; one that ends wrongly leaves its files, under their numbers, for whoever looks at it."""
        one = command(words, self.folder)
        self.codes[one.code] += 1
        self.seconds, self.extra_mib = max(self.seconds, one.seconds), max(self.extra_mib, one.extra_mib)
        if one.wrong:
            self.wrong.append(one)

    def __str__(self) -> str:
        kinds = dict(Counter(one.wrong for one in self.wrong))
        counts = f"{self.codes.total()} commands, exit codes {dict(sorted(self.codes.items()))}, wrong: {kinds or 'none'}"
        return f"{counts}; longest {self.seconds:.1f} s, most memory {self.extra_mib:.0f} MiB"


def commanded(data: st.SearchStrategy[Any], ends: Callable[[Figures, Any], None], folder: Path, count: int) -> Figures:
    """Let `ends` run commands over `count` examples of `data` in `folder`. Fails with each kind that ended wrongly."""
    figures = Figures(folder)

    @settings(examples(count), max_examples=count, derandomize=os.environ.get("ULTRASCALE_NIGHTLY") != "1",
              phases=[Phase.generate])  # fmt: skip
    @given(data=data)
    def work(data: Any) -> None:
        before = len(figures.wrong)
        ends(figures, data)
        for number in range(before, len(figures.wrong)):
            figures.wrong[number] = figures.wrong[number]._replace(said=f"{figures.wrong[number].said[-3000:]}\n{data!r:.2000}")

    work()
    first = {f"{one.wrong} {one.said.splitlines()[-2][:60]}": one for one in reversed(figures.wrong)}
    assert not figures.wrong, "\n\n".join([str(figures), *(f"{one.wrong}: {one.words}\n{one.said}" for one in first.values())])
    return figures


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
HUGE = (
    b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5_000, b"1e999", b"-1e-999", b'"' + b"\\u0000" * 1000 + b'"', b"\xff\xfe[\0]\0",
    b"\xef\xbb\xbf{}", b"", b"\0", b"NaN", b"null", b"[]", b"{}", b'"x"', b"\xed\xa0\x80", b"{" + b'"a":1,' * 1000 + b'"a":1}',
)  # fmt: skip
"""Bytes that have broken somebody's parser: deep nesting, long numbers, byte-order marks, lone surrogates, keys given twice."""

LIES: tuple[Any, ...] = (
    "../../etc/passwd", "/etc/passwd", "/dev/zero", "a\0b", "\ud800", "x" * 5000, 2**63, -1, 10**15, 10**39, 10**41, 0.5,
    5e-324, 1e-300, 1e300, -0.0, float("inf"), float("nan"), [], {}, [0] * 3000, dict.fromkeys(map(str, range(3000)), 1),
)  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """`good` with a few bytes changed, cut out, put in or repeated; or something else entirely."""
    if draw(st.integers(0, 19)) == 0:
        return draw(st.sampled_from(HUGE) | st.binary(max_size=64))
    data = good
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 16)))
        new = draw(
            st.binary(max_size=6) | st.sampled_from([b"", data[at:end] * 3, b"\0", b"\n", b'"', b"-1", b"99999999999999999999"])
        )
        data = data[:at] + new + data[end:]
    return data


@st.composite
def changed(draw: st.DrawFn, good: Any) -> bytes:
    """`good`, a JSON value, with a value at some place replaced, or a key added, removed or renamed; as bytes."""
    content = json.loads(json.dumps(good))
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(_paths(content)))
        value = deepcopy(draw(JSON | st.sampled_from(LIES)))
        if not path:
            return json.dumps(value).encode()
        place = content
        for key in path[:-1]:
            place = place[key]
        if isinstance(place, dict) and draw(st.integers(0, 4)) == 0:
            place.pop(path[-1])
        elif isinstance(place, dict) and draw(st.integers(0, 4)) == 0:
            place[draw(st.text(max_size=6))] = value
        else:
            place[path[-1]] = value
    return json.dumps(content).encode()


def _paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value[:20]) if isinstance(value, list) else ()
    return [at, *(path for key, item in inner for path in _paths(item, (*at, key)))]
