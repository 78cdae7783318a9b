"""Tasks distributed over processes. `concurrent.futures` is unsuitable: its workers outlive a parent that is killed, it cannot
stop a running task, and a task cannot report progress.

Processes come from a fork server: a plain fork of a process in which `tokenizers` has already used its threads may hang. Each
worker ends itself when its parent is gone, so a killed run leaves no processes behind.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, TypeVar

from ultrascale.data.files import DataError
from ultrascale.heap import map_large_blocks
from ultrascale.main_module import end_with_parent, hidden_main

Task = TypeVar("Task")
Result = TypeVar("Result")
Work = Callable[[Task, Callable[[int, int], None]], Result]
_REPORT_SECONDS = 0.1


def run_tasks(
    tasks: Sequence[Task], work: Work[Task, Result], *, workers: int, report: Callable[[int, int, int], None]
) -> list[Result]:
    """The result of each task, in order. Tasks start in the order given; the first error ends all of them and is raised.

    `work` is a module-level function; it receives a task and a function that reports two numbers of progress, which `report`
    gets with the task's index. If there are fewer tasks than `workers`, each process tokenizes with several threads. Raises
    DataError if a worker dies.
    """
    num_processes = max(1, min(workers, len(tasks)))
    threads = max(1, workers // num_processes)
    if num_processes == 1:
        with _threads(threads):
            return [work(task, lambda a, b, place=place: report(place, a, b)) for place, task in enumerate(tasks)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    with _workers(context, num_processes, work, threads) as running:
        return _split_tasks(tasks, running, report)


@contextmanager
def _workers(context: Any, count: int, work: Work[Any, Any], threads: int) -> Iterator[dict[Connection, ForkServerProcess]]:
    running: dict[Connection, ForkServerProcess] = {}
    try:
        for _ in range(count):
            parent_end, child_end = context.Pipe()
            process = context.Process(target=_serve, args=(child_end, work, threads), daemon=True)
            with hidden_main():
                process.start()
            child_end.close()
            running[parent_end] = process
        yield running
    finally:
        for process in running.values():
            process.kill()  # a fork server that a launcher has started passes on that SIGTERM is blocked
        for connection, process in running.items():
            process.join()
            connection.close()


def _split_tasks(
    tasks: Sequence[Any], running: dict[Connection, ForkServerProcess], report: Callable[[int, int, int], None]
) -> list[Any]:
    results: dict[int, Any] = {}
    places = iter(range(len(tasks)))
    for connection in running:
        _assign_tasks(connection, tasks, places)
    while len(results) < len(tasks):
        for connection in wait(list(running)):
            assert isinstance(connection, Connection)
            try:
                kind, place, value = connection.recv()
            except (EOFError, ConnectionResetError) as error:
                raise _death(running[connection]) from error
            if kind == "error":
                raise value
            if kind == "progress":
                report(place, *value)
            else:
                results[place] = value
                _assign_tasks(connection, tasks, places)
    return [results[place] for place in range(len(tasks))]


def _assign_tasks(connection: Connection, tasks: Sequence[Any], places: Iterator[int]) -> None:
    place = next(places, None)
    if place is not None:
        connection.send((place, tasks[place]))


def _death(process: ForkServerProcess) -> DataError:
    process.join()
    problem = f"a worker process ended with exit code {process.exitcode}"
    remedy = "Perhaps memory ran out: use fewer --workers. The same command goes on; finished shards are kept."
    return DataError("data prepare", problem, remedy)


def _serve(connection: Connection, work: Work[Any, Any], threads: int) -> None:
    """Main loop of a worker: receive a task, send its result or error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives the signal too, and ends us
    end_with_parent()
    os.environ.update(_thread_variables(threads))
    map_large_blocks()
    while True:
        place, task = connection.recv()
        last = 0.0

        def report(first: int, second: int, place: int = place) -> None:
            nonlocal last
            if time.monotonic() - last > _REPORT_SECONDS:
                last = time.monotonic()
                connection.send(("progress", place, (first, second)))

        try:
            connection.send(("done", place, work(task, report)))
        except Exception as error:
            connection.send(("error", place, error))


def _thread_variables(threads: int) -> dict[str, str]:
    """Environment variables that `tokenizers` reads when it first encodes a batch."""
    return {"TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false", "RAYON_NUM_THREADS": str(threads)}


@contextmanager
def _threads(threads: int) -> Iterator[None]:
    """Sets the thread variables for work done in this process, then restores its environment."""
    before = {name: os.environ.get(name) for name in _thread_variables(threads)}
    os.environ.update(_thread_variables(threads))
    map_large_blocks()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
