"""`ultrascale import`: a Hugging Face folder as the first checkpoint of a run."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from ultrascale.cli.terminal.parse import parse_with_overrides
from ultrascale.cli.terminal.screen import print_json
from ultrascale.config.resolve import resolve
from ultrascale.config.rules.trainable import expect_trainable
from ultrascale.config.train_defaults import train_defaults
from ultrascale.console import print_line
from ultrascale.description.architecture.huggingface import from_hf
from ultrascale.models.files.tokenizer_files import left_behind
from ultrascale.models.files.weight_files import weight_files


@dataclass(frozen=True)
class ImportOptions:
    """Make the weights of a Hugging Face folder the first checkpoint of a run; `ultrascale train` continues from them.

    The run's model must be that of the folder: `[model] path = "FOLDER"`. Any setting can follow as a dotted flag.

    Example: ultrascale import models/smollm2-135m continue.toml --name continued
    """

    source: Path
    """Folder with config.json and safetensors weights. Pickle files are never read."""
    run: str
    """TOML file of the run."""
    json: bool = False
    """Print one JSON object."""


def command(arguments: list[str]) -> int:
    """Run the verb; returns its exit code."""
    positional = {"source": "FOLDER", "run": "RUN.TOML"}
    options, overrides = parse_with_overrides(ImportOptions, "import", arguments, positional=positional)
    source, path = options.source, options.run
    run = train_defaults(resolve(path, overrides, require_data=True))[0].run  # as `train` will have it
    expect_trainable(from_hf(source))
    weight_files(source)
    from ultrascale.train.folder.export import tokenizer_of
    from ultrascale.train.start.trained import import_as_first_checkpoint

    checkpoint = import_as_first_checkpoint(source, run)
    tokenizer = tokenizer_of(run)
    if left := left_behind(source, tokenizer):
        rule = f"exports will be without the {', '.join(left)} of {source}, which the data were prepared without"
        print_line(f"note: {rule}; to keep them, copy them beside {tokenizer}.", "stderr")
    if options.json:
        print_json({"source": str(source), "checkpoint": str(checkpoint)}, "import")
    else:
        print(f"{source} -> {checkpoint}\nnow: ultrascale train {shlex.join([path, *overrides])}")
    return 0
