"""Hugging Face folders, import and export: safetensors shards, their index, `config.json`, tokenizer and generation config.

Only safetensors is read, never pickle. `models.files.stored` maps our weights to a family's files, in both directions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ultrascale.config.rules.trainable import expect_trainable
from ultrascale.description.architecture.huggingface import from_hf, to_hf
from ultrascale.description.architecture.model import Model
from ultrascale.description.problems import Problem, SpecError, mistake
from ultrascale.models.files.folders import fill_folder
from ultrascale.models.files.stored import StoredTensor, stored_weights, weight_shapes
from ultrascale.models.files.tokenizer_files import TOKENIZER_FILE, copy_tokenizer, end_ids
from ultrascale.models.files.weight_files import INDEX_FILE, WEIGHTS_FILE, is_exported, weight_files

# Tables in old files that can be derived from config.json.
_DERIVED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
_FLOATS = ("F64", "F32", "BF16", "F16")


def export_folder(
    state: Mapping[str, Tensor],
    model: Model,
    folder: str | Path,
    *,
    tokenizer: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
    source: Path | None = None,
) -> Path:
    """Write `state` (whole tensors under the names of `description.architecture.weights`) as a folder that transformers loads.

    `tokenizer`: a `tokenizer.json` or a folder with one, to be copied. dtype None: as the tensors are. The folder appears whole
    or not at all: everything is written to a temporary folder next to it, which is then renamed. Raises SpecError if a weight
    is missing, unknown or of another shape, if the family cannot express the model, or if the folder exists and `overwrite` is
    false. `overwrite` replaces nothing but an earlier export, and nothing that overlaps `source`, the folder the weights came
    from. Raises FolderError if the disk is full.
    """
    expect_trainable(model)
    _check_state(state, model)
    config = to_hf(model) | {"torch_dtype": str(dtype or next(iter(state.values())).dtype).removeprefix("torch.")}
    with fill_folder(Path(folder), is_ours=is_exported, overwrite=overwrite, source=source) as partial:
        special = copy_tokenizer(tokenizer, partial, max_length=model.max_position_embeddings) if tokenizer else {}
        ends = end_ids(partial / TOKENIZER_FILE) if tokenizer else []
        _write_shards(state, model, partial, dtype, max_shard_bytes)
        _write_json(partial / "config.json", config | special)
        _write_json(
            partial / "generation_config.json",
            {"do_sample": True, **special, **({"eos_token_id": ends} if len(ends) > 1 else {})},
        )
    return Path(folder)


def expect_same_model(place: str, config_json: bytes, model: Model) -> None:
    """Raises SpecError if `place`, which would be replaced, holds another model by its `config.json`: one that was downloaded,
    or another run's."""
    try:
        held = json.loads(config_json)
    except (ValueError, RecursionError):
        return
    config = to_hf(model)
    sizes = [key for key, value in config.items() if isinstance(value, int) and not key.endswith(_NO_SIZE)]
    keys = [key for key in ("model_type", *sizes) if isinstance(held, dict) and key in held and held[key] != config[key]]
    if keys:
        values = ", ".join(f"{key} = {held[key]}" for key in keys[:3])
        raise mistake(place, f"holds another model ({values}) and is not replaced", "Choose another place.")


_NO_SIZE = ("token_id", "max_position_embeddings", "use_cache")
"""Ends of keys that may change within one model."""


def import_folder(path: str | Path) -> tuple[Model, dict[str, Tensor]]:
    """Read a Hugging Face folder: the model, and its weights under our names, in their stored dtype.

    Raises SpecError naming every tensor that is missing, unknown, duplicate, or of another shape or kind, files that cannot be
    read, and features of a model that can be planned but not run.
    """
    folder = Path(path)
    model = from_hf(folder)
    expect_trainable(model)
    table = stored_weights(model)
    shapes = weight_shapes(model)
    state: dict[str, Tensor] = {}
    with ExitStack() as files:
        file_of = _open_tensors(folder, files)
        names = _match_names(file_of.keys(), table, model)
        predictions = table.keys() - stored_weights(replace(model, num_nextn_predict_layers=0)).keys()
        if predictions and not predictions & names.keys():
            rule = f"is {model.num_nextn_predict_layers}, but no weight of such a block is there: transformers saves none"
            raise mistake("num_nextn_predict_layers", rule, "Set it to 0 in config.json.", str(folder))
        problems = _compare(
            table, shapes, {names[name]: tuple(file_of[name].get_slice(name).get_shape()) for name in names}, folder
        )
        problems += _unreadable(file_of, names, folder)
        if problems:
            raise SpecError(problems)
        for name, ours in names.items():
            if not table[ours].is_copy:
                _fill(state, table[ours], file_of[name].get_tensor(name), shapes)
        _check_copies(file_of, {name: table[ours] for name, ours in names.items()}, state, folder)
    return model, {name: state[name] for name in shapes}


def _fill(state: dict[str, Tensor], stored: StoredTensor, whole: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, part in stored.split(whole, shapes):
        if stored.expert is None:
            state[name] = part.contiguous()
        else:
            state.setdefault(name, torch.empty(shapes[name], dtype=part.dtype))[stored.expert] = part


def _check_state(state: Mapping[str, Tensor], model: Model) -> None:
    shapes = weight_shapes(model)
    problems = [
        Problem(name, "is missing from the state", "Give every weight of the model.") for name in shapes.keys() - state.keys()
    ]
    problems += [Problem(name, "is no weight of this model", "Leave it out.") for name in sorted(state.keys() - shapes.keys())]
    problems += [
        Problem(name, f"must have shape {shapes[name]}, has {tuple(state[name].shape)}", "Give the whole tensor.")
        for name in shapes.keys() & state.keys()
        if tuple(state[name].shape) != shapes[name]
    ]
    if problems:
        raise SpecError(sorted(problems, key=lambda problem: problem.key))


def _write_shards(
    state: Mapping[str, Tensor], model: Model, folder: Path, dtype: torch.dtype | None, max_shard_bytes: int
) -> None:
    table = stored_weights(model)

    def tensor(stored: StoredTensor) -> Tensor:
        whole = stored.join(state).detach()
        # Copies are written as tensors of their own.
        return whole.to("cpu", whole.dtype if stored.keeps_dtype else dtype, copy=stored.is_copy).contiguous()

    shapes = weight_shapes(model)
    itemsizes = {name: (dtype or tensor.dtype).itemsize for name, tensor in state.items()}
    sizes = {name: prod(stored.shape(shapes)) * itemsizes[stored.names[0]] for name, stored in table.items()}
    shards = _pack(sizes, max_shard_bytes)
    file_of: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = WEIGHTS_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: tensor(table[name]) for name in names}, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(names, file)
    if len(shards) > 1:
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of})


def _pack(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Names in order, in groups of at most `max_bytes`; a larger tensor has a group of its own."""
    groups: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not groups or filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def _open_tensors(folder: Path, files: ExitStack) -> dict[str, Any]:
    """Open file of every tensor, by name."""
    file_of: dict[str, Any] = {}
    for file in weight_files(folder):
        try:
            opened = files.enter_context(safe_open(file, framework="pt"))
        except FileNotFoundError:
            raise mistake(str(file), f"is named by {INDEX_FILE} but not there", "Copy the whole folder.") from None
        except (SafetensorError, OSError) as error:
            raise mistake(str(file), f"is no safetensors file: {error}", "Copy it again.") from None
        file_of |= dict.fromkeys(opened.keys(), opened)
    return file_of


def _match_names(stored_names: Any, table: Mapping[str, StoredTensor], model: Model) -> dict[str, str]:
    """Names of `table` by the names in the file: files of the bare model lack the prefix."""
    prefix = "transformer." if model.model_type == "gpt2" else "model."
    names = {}
    for name in stored_names:
        is_spare_head = name == "lm_head.weight" and model.tie_word_embeddings
        if not name.endswith(_DERIVED) and not is_spare_head:
            names[name] = name if name in table or prefix + name not in table else prefix + name
    return names


def _compare(
    table: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    actual: Mapping[str, tuple[int, ...]],
    folder: Path,
) -> list[Problem]:
    where, remedy = str(folder), "Check that weights and config.json belong together."
    expected = {name: stored.shape(shapes) for name, stored in table.items()}
    needed = [name for name, stored in table.items() if not stored.is_copy]
    problems = [Problem(name, "is missing", remedy, where) for name in needed if name not in actual]
    problems += [Problem(name, "is no weight of this model", remedy, where) for name in actual if name not in expected]
    for name in expected.keys() & actual.keys():
        if expected[name] != actual[name]:
            rule = f"must have shape {expected[name]}, has {actual[name]}"
            problems.append(Problem(name, rule, remedy, where))
    return problems


def _unreadable(file_of: Mapping[str, Any], names: Mapping[str, str], folder: Path) -> list[Problem]:
    """Tensors that occur twice, with and without the prefix, and those that are not plain floating point."""
    ours = list(names.values())
    problems = [
        Problem(name, f"is there a second time, as {names[name]}", "Keep one of the two.", str(folder))
        for name in names
        if name != names[name] and ours.count(names[name]) > 1
    ]
    for name in names:
        kind = file_of[name].get_slice(name).get_dtype()
        if kind not in _FLOATS:
            remedy = "Quantized weights cannot be trained; take the original ones."
            problems.append(Problem(name, f"must be one of {', '.join(_FLOATS)}, is {kind}", remedy, str(folder)))
    return problems


def _check_copies(
    file_of: Mapping[str, Any], table: Mapping[str, StoredTensor], state: Mapping[str, Tensor], folder: Path
) -> None:
    """Check copies: files may repeat the embedding as a tied head, and both in prediction blocks; any other value there would
    be lost."""
    copies = {name: stored.names[0] for name, stored in table.items() if stored.is_copy}
    if "lm_head.weight" in file_of and "lm_head.weight" not in state:
        copies["lm_head.weight"] = "embed_tokens.weight"
    for name, ours in copies.items():
        if not torch.equal(file_of[name].get_tensor(name), state[ours]):
            rule, remedy = f"differs from {ours}, which it copies", "Set num_nextn_predict_layers to 0 there."
            if name == "lm_head.weight":
                rule, remedy = (
                    "differs from the embedding, but config.json ties them",
                    "Set tie_word_embeddings to false there.",
                )
            raise mistake(name, rule, remedy, str(folder))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
