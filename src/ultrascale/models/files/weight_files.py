"""Names and paths of the weight files in a Hugging Face folder. Does not import torch."""

from __future__ import annotations

import re
from pathlib import Path

from ultrascale.description.architecture.huggingface import CONVERT, PICKLES
from ultrascale.description.parsing import MOST_JSON, parse_json, read_bounded
from ultrascale.description.problems import mistake
from ultrascale.models.files.tokenizer_files import TOKENIZER_FILES

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_SHARD_FILE = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def is_exported(name: str) -> bool:
    """True if an export writes a file of this name."""
    known = (WEIGHTS_FILE, INDEX_FILE, "config.json", "generation_config.json", *TOKENIZER_FILES)
    return name in known or _SHARD_FILE.fullmatch(name) is not None


def weight_files(folder: Path) -> list[Path]:
    """Weight files of `folder`. Raises SpecError if there are none."""
    if (folder / INDEX_FILE).exists():
        return indexed_shards(folder / INDEX_FILE)
    if (folder / WEIGHTS_FILE).exists():
        return [folder / WEIGHTS_FILE]
    remedy = f"A folder with {WEIGHTS_FILE}, or with shards and {INDEX_FILE}, is needed."
    if any(path.suffix in PICKLES for path in folder.glob("*")):
        remedy += f" {CONVERT}"
    raise mistake(str(folder), "holds no safetensors weights", remedy)


def indexed_shards(index: Path) -> list[Path]:
    """Files that the `weight_map` of `index` names, in its folder. Raises SpecError if it is not an index, or names a file
    elsewhere."""
    try:
        names = sorted(set(parse_json(read_bounded(index, 4 * MOST_JSON))["weight_map"].values()))
        if not names or not all(_PLAIN_NAME.fullmatch(name) for name in names):
            raise ValueError("names what is no file beside it")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise mistake(str(index), f"is no index of shards: {error!r:.200}", "Copy it again.") from None
    return [index.parent / name for name in names]
