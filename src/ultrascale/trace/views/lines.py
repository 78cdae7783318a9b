"""Lines of code for a trace: lines of `ultrascale` for messages and memory, lines of any code for errors."""

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
"""Prefixes of the standard library, and of code without a file."""
INSTALLED = sysconfig.get_path("purelib") + os.sep
"""Folder of installed packages, which may be below the standard library's: a model may come from there."""
READERS = tuple(PACKAGE + name + os.sep for name in ("train", "parallel", "kernels"))
"""Our packages that may read values (losses, norms, vocabulary checks): a made-up value does no harm there."""
NOWHERE = "a place without Python"


def line_of_ours(frame: FrameType | None) -> str:
    """`file:line` of the innermost caller in `ultrascale` outside `trace` and `measure`."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE) and not name.startswith(WATCHING) and frame.f_code.co_name != "__torch_dispatch__":
            return f"{name[len(PACKAGE) :]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def line_of_code(frame: FrameType | None) -> str:
    """`file:line` of the innermost caller outside torch, Python and the trace: in a user's model, or ours."""
    frame = _frame_of_code(frame)
    return NOWHERE if frame is None else _short_location(frame.f_code.co_filename, frame.f_lineno)


def may_read(frame: FrameType | None) -> bool:
    """True if the caller found by `line_of_code` may read a value: a model may not."""
    frame = _frame_of_code(frame)
    return frame is not None and frame.f_code.co_filename.startswith(READERS)


def _frame_of_code(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not is_code(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def line_of_error(error: BaseException) -> str:
    """`file:line` of an error's origin, chosen as in `line_of_code`."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if is_code(frame.f_code.co_filename):
            return _short_location(frame.f_code.co_filename, line)
    return NOWHERE


def is_code(file: str) -> bool:
    """True for a file of a model or trainer, not of Python, torch or the trace."""
    if file.startswith((*WATCHING, TORCH)):
        return False
    return file.startswith(INSTALLED) or not file.startswith(PYTHON)


def _short_location(file: str, line: int) -> str:
    """`file:line` relative to the package for `ultrascale`, else to the current folder if below it."""
    if file.startswith(PACKAGE):
        return f"{file[len(PACKAGE) :]}:{line}"
    relative = os.path.relpath(file)
    return f"{file if relative.startswith('..') else relative}:{line}"
