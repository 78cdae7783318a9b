"""The lines of code that a trace names: of the program for messages and memory, of anybody for what cannot be traced."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

import torch

PACKAGE = str(Path(__file__).parents[2]) + os.sep
WATCHING = tuple(PACKAGE + name + os.sep for name in ("trace", "measure"))
TORCH = os.path.dirname(torch.__file__) + os.sep
PYTHON = (sysconfig.get_path("stdlib") + os.sep, "<")
"""Python's own files, and what has no file."""
INSTALLED = sysconfig.get_path("purelib") + os.sep
"""Folder of installed packages, in some installations below the standard library: a model may come from there."""
READERS = tuple(PACKAGE + name + os.sep for name in ("train", "parallel", "kernels"))
"""Packages that may read losses, norms and whether ids are in the vocabulary: what they do with a pretended one is known."""
NOWHERE = "a place without Python"


def line_of_ours(frame: FrameType | None) -> str:
    """`file:line` of the innermost caller in `ultrascale` that is neither of the trace nor of what measures."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE) and not name.startswith(WATCHING) and frame.f_code.co_name != "__torch_dispatch__":
            return f"{name[len(PACKAGE) :]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def line_of_code(frame: FrameType | None) -> str:
    """`file:line` of the innermost caller that is not torch's, Python's or the trace's: a user's own model, or ours."""
    frame = _frame_of_code(frame)
    return NOWHERE if frame is None else _short_location(frame.f_code.co_filename, frame.f_lineno)


def may_read(frame: FrameType | None) -> bool:
    """True if the code that is here, as of `line_of_code`, may read a number: a model may not."""
    frame = _frame_of_code(frame)
    return frame is not None and frame.f_code.co_filename.startswith(READERS)


def _frame_of_code(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not is_code(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def line_of_error(error: BaseException) -> str:
    """`file:line`, as of `line_of_code`, of where an error came from."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if is_code(frame.f_code.co_filename):
            return _short_location(frame.f_code.co_filename, line)
    return NOWHERE


def is_code(file: str) -> bool:
    """True if a file belongs to somebody who writes models or trainers."""
    if file.startswith((*WATCHING, TORCH)):
        return False
    return file.startswith(INSTALLED) or not file.startswith(PYTHON)


def _short_location(file: str, line: int) -> str:
    """Files of `ultrascale` from there, others from the current folder if they are below it."""
    if file.startswith(PACKAGE):
        return f"{file[len(PACKAGE) :]}:{line}"
    relative = os.path.relpath(file)
    return f"{file if relative.startswith('..') else relative}:{line}"
