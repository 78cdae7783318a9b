"""Tokenizer files of a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ultrascale.description.architecture.special_tokens import BEGINS, ENDS
from ultrascale.description.parsing import MIB, parse_json, read_bounded
from ultrascale.description.problems import Problem, SpecError, mistake

TOKENIZER_FILE = "tokenizer.json"
MOST_TOKENIZER = 256 * MIB
"""Most characters of a tokenizer file; the largest vocabularies have 40 million."""
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "vocab.json", "merges.txt")
TOKENIZER_FILES = (TOKENIZER_FILE, *_BESIDE)


def find_tokenizer(path: str | Path) -> Path:
    """The `tokenizer.json` that `path` names or contains. Raises SpecError if there is none."""
    path = Path(path)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise mistake(str(file), "is not there", f"Give a {TOKENIZER_FILE} or a folder with one.")
    return file


def copy_tokenizer(source: str | Path, folder: Path, *, max_length: int) -> dict[str, int]:
    """Copy a tokenizer into `folder`; returns the token ids that belong in config.json (`bos_token_id`, `eos_token_id`).

    Other tokenizer files in the same folder are copied too; without a `tokenizer_config.json` one is created. Raises SpecError
    if the file is missing or not a tokenizer.
    """
    file = find_tokenizer(source)
    special = special_tokens(file)
    shutil.copyfile(file, folder / TOKENIZER_FILE)
    copy_beside(file, folder)
    if not (folder / "tokenizer_config.json").exists():
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length}
        config |= {f"{role}_token": token for role, (token, _) in special.items()}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return {f"{role}_token_id": number for role, (_, number) in special.items()}


def copy_beside(file: Path, folder: Path) -> None:
    """Copy the other tokenizer files of a Hugging Face folder, its chat template among them, in place of earlier ones."""
    if file.parent.resolve() == folder.resolve():
        return
    for name in _BESIDE:
        if (file.parent / name).is_file():
            shutil.copyfile(file.parent / name, folder / name)
        else:
            (folder / name).unlink(missing_ok=True)


def left_behind(source: Path, tokenizer: Path | None) -> list[str]:
    """Files of a Hugging Face folder that change how `tokenizer` is used, and are not beside it. Exports have a
    `tokenizer_config.json` of their own then."""
    names = [name for name in _BESIDE if name.endswith((".jinja", "_config.json", "_map.json"))]
    if tokenizer is None:
        return []
    return [name for name in names if (source / name).is_file() and not (tokenizer.parent / name).is_file()]


def end_ids(file: Path) -> list[int]:
    """Ids of the tokens that end a text: the tokenizer's own (of a turn, in a chat model), then the usual one of a document."""
    ids, named = _special_ids(file), special_tokens(file)
    of_document = next((ids[token] for token in ENDS if token in ids), None)
    ends = (named["eos"][1] if "eos" in named else None, of_document)
    return list(dict.fromkeys(number for number in ends if number is not None))


def special_tokens(file: Path) -> dict[str, tuple[str, int]]:
    """Tokens that end ("eos") and begin ("bos") a document, with their ids, where `tokenizer.json` has common ones.

    A `tokenizer_config.json` in the same folder takes precedence; if there is only one special token, it ends documents.
    """
    ids = _special_ids(file)
    named = file.with_name("tokenizer_config.json")
    config = _read(named) if named.is_file() else {}
    tokens: dict[str, tuple[str, int]] = {}
    for role, usual in (("eos", ENDS), ("bos", BEGINS)):
        token = config.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is None and not config:
            lone = list(ids) if role == "eos" and len(ids) == 1 else []
            token = next((name for name in (*usual, *lone) if name in ids), None)
        if isinstance(token, str) and token in ids:
            tokens[role] = (token, ids[token])
    return tokens


def _special_ids(file: Path) -> dict[str, int]:
    """Ids of the special tokens of a `tokenizer.json` by their text."""
    try:
        tokens = [token for token in _read(file).get("added_tokens", []) if token.get("special")]
        ids = {token["content"]: token["id"] for token in tokens}
        if not all(isinstance(text, str) and type(number) is int for text, number in ids.items()):
            raise TypeError("an id is no number, or a token no text")
    except (AttributeError, KeyError, TypeError) as error:
        problem = Problem(str(file), f"has added_tokens that are none ({error!r:.80})", "Copy it again from its model.")
        raise SpecError([problem]) from None
    return ids


def _read(file: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_bounded(file, MOST_TOKENIZER))
    except (OSError, ValueError) as error:
        raise mistake(str(file), f"cannot be read: {error}", "Repair or replace the file.") from None
    if not isinstance(content, dict):
        raise mistake(str(file), "must hold a JSON object", "Repair or replace the file.")
    return content
