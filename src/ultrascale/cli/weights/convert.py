"""`ultrascale convert`: a foreign pickle checkpoint as a folder of safetensors."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from ultrascale.cli.terminal.parse import parse
from ultrascale.cli.terminal.screen import print_json
from ultrascale.description.units import count_of


def convert(
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")],
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")],
    /,
    overwrite: bool = False,
    unconfined: bool = False,
    json: bool = False,
) -> int:
    """Convert a pickle checkpoint (.bin, .pt, .pth, .ckpt), which no other command reads, to a folder of safetensors.

    A pickle is a program. It is read in a process that can open no file, connect to nothing and start or signal nothing, with
    bounded memory and time, and only tensors are kept.

    Example: ultrascale convert downloads/old-model models/old-model

    Args:
        source: Folder with pytorch_model.bin (or its index and shards), or one file.
        out: Folder to create, atomically.
        overwrite: Replace OUT if it is an earlier export; nothing else is ever replaced.
        unconfined: Read it even if the kernel cannot sandbox the process (no seccomp filter). Only for files you trust.
        json: Print one JSON object.
    """
    from ultrascale.models.files.convert import convert as converted

    done = converted(source, out, overwrite=overwrite, unconfined=unconfined)
    if json:
        print_json(asdict(done) | {"folder": str(done.folder)}, "convert")
        return 0
    print(f"{source} -> {done.folder}: {count_of(done.tensors, 'tensor')} of {count_of(done.files, 'pickle')}")
    print(f"read in a process confined by: {', '.join(done.confined_by)}")
    if "seccomp filter" not in done.confined_by:
        print("warning: without a seccomp filter it could open files, connect and signal, had the file been hostile")
    if done.left_out:
        print(f"left out, being no tensors: {', '.join(done.left_out[:10])}")
    if not done.has_config:
        print("there is no config.json beside it: put one into the folder before `ultrascale import`")
    return 0


command = partial(parse, convert, "convert")
"""Run the verb; returns its exit code."""
