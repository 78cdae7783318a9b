"""Text that exists on every machine with Python: the sources of its standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path

from ultrascale.data.files import DataError
from ultrascale.data.preparing.prepare import Prepared, Progress, Recipe, prepare
from ultrascale.data.reading.inputs import find_files
from ultrascale.demo.claims import DemoError

VOCABULARY = 2048
GLOB = "*.py"
# Tests and installed packages would make it twenty times larger; the others are tables, not code.
EXCLUDED = (
    "test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "encodings", "pydoc_data", "config-*",
)  # fmt: skip
HELD_OUT = 0.05
LARGEST_BYTES = 40_000_000
"""More than three times the size of any Python's library: above it, the folder contains something else, which would take too
long."""


def library_folder() -> Path:
    """Folder of this Python's standard library. Raises DemoError if its sources are missing."""
    folder = Path(sysconfig.get_path("stdlib"))
    expect_library(folder)
    return folder


def expect_library(folder: Path) -> None:
    """Raises DemoError unless `folder` has the sources of a standard library, and little else."""
    try:
        files = find_files([folder], glob=GLOB, exclude=EXCLUDED)
    except DataError as error:
        raise DemoError(
            f"this Python has no sources of its standard library ({error.where} {error.problem}), and they are the demo's "
            "text. Install the full Python (Debian: apt install python3) and start the demo with it."
        ) from None
    size = sum(file.size for file in files)
    if size > LARGEST_BYTES:
        raise DemoError(
            f"{folder} holds {size / 1e6:.0f} MB of {GLOB} files, where a standard library has about 10. "
            "Start the demo with another Python, whose library holds nothing else."
        )


def prepare_library(
    library: Path, output: Path, *, on_progress: Callable[[Progress], None], workers: int | None = None
) -> Prepared:
    """Tokenize the library into `output` with its own tokenizer; a repeated call costs nothing. Raises DataError."""
    recipe = Recipe(
        train_tokenizer=VOCABULARY, glob=GLOB, exclude=EXCLUDED, on_bad="skip", validation_fraction=HELD_OUT,
    )  # fmt: skip
    return prepare([library], output=output, recipe=recipe, workers=workers, on_progress=on_progress)


def prepare_words(library: Path, output: Path) -> list[str]:
    """Words of the command equivalent to `prepare_library`."""
    words = ["data", "prepare", str(library), "--output", str(output), "--glob", GLOB]
    words += [f"--exclude={name}" for name in EXCLUDED]
    return [*words, f"--train-tokenizer={VOCABULARY}", f"--validation-fraction={HELD_OUT}", "--on-bad=skip"]
