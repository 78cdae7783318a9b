"""Parsers under hostile input, in a process that may take little more memory than it has, and little time.

A parser gives a result or an error of ours, whatever it reads: no traceback, no hang, no memory that grows with a number in the
file.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXTRA_MIB = 512
SECONDS = 100
TIMES = int(os.environ.get("ULTRASCALE_FUZZ", "1"))
"""Multiplies the number of examples; at night 20."""


def examples(count: int) -> settings:
    """Settings of a fuzz test of `count` examples in CI."""
    return settings(
        max_examples=count * TIMES, deadline=None, database=None, derandomize=TIMES == 1,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )  # fmt: skip


def confined(work: Callable[..., None], *arguments: Any) -> None:
    """Run `work` in a forked process that may take 512 MiB more, and 100 s. Fails with its traceback."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sending, work, arguments), daemon=True)
    process.start()
    sending.close()
    try:
        said = receiving.recv() if receiving.poll(SECONDS * TIMES) else "took too long: a hang"
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
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (EXTRA_MIB << 20), resource.RLIM_INFINITY))
    try:
        work(*arguments)
        sending.send("")
    except BaseException as error:
        sending.send(told(error))


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

SPARKS = (b"\0", b"\n", b'"', b"-1", b"99999999999999999999")
LIES = ("../../etc/passwd", "/etc/passwd", "a\0b", "x" * 5000, 2**63, -1, 10**15, 0.5, [], {})


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
        value = draw(
            JSON | st.sampled_from(["../../etc/passwd", "/etc/passwd", "a\0b", "x" * 5000, 2**63, -1, 10**15, 0.5, [], {}])
        )
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
