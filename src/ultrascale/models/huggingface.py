"""Hugging Face folders in and out: safetensors shards, their index, `config.json`, tokenizer and generation config.

Only safetensors is read, never pickle. Names differ by a prefix; GPT-2 also keeps its projections transposed ("Conv1D") and
query, key and value in one matrix. `stored_weights` is the one table of that, read in both directions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ultrascale.models.folders import fill_folder
from ultrascale.models.tokenizer_files import TOKENIZER_FILES, copy_tokenizer
from ultrascale.spec.huggingface import from_hf, to_hf
from ultrascale.spec.model import Model
from ultrascale.spec.problems import Problem, SpecError
from ultrascale.spec.trainable import expect_trainable
from ultrascale.spec.weights import weights

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SHARD_FILE = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_GPT2_NAMES = {
    "embed_tokens": "wte", "embed_positions": "wpe", "norm": "ln_f", "input_layernorm": "ln_1",
    "self_attn.o_proj": "attn.c_proj", "post_attention_layernorm": "ln_2",
    "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj",
}  # fmt: skip
# Tables that old files carry and that follow from config.json.
_DERIVED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
_FLOATS = ("F64", "F32", "BF16", "F16")


@dataclass(frozen=True)
class Stored:
    """How weights of ours lie in a file: one after the other along dim 0, then perhaps transposed."""

    names: tuple[str, ...]
    transposed: bool = False


def stored_weights(model: Model) -> dict[str, Stored]:
    """Hugging Face's name of every tensor of `model` and the weights of ours it holds."""
    table: dict[str, Stored] = {}
    for weight in weights(model):
        if model.model_type != "gpt2":
            prefix = "" if weight.part == "head" else "model."
            table[prefix + weight.name] = Stored((weight.name,))
            continue
        name, transposed = _gpt2_name(weight.name), weight.part in ("attention", "mlp") and len(weight.shape) == 2
        earlier = table[name].names if name in table else ()
        table[name] = Stored((*earlier, weight.name), transposed)
    return table


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
    """Write `state` (whole tensors under the names of `spec.weights`) as a folder that transformers loads.

    `tokenizer`: a `tokenizer.json` or a folder with one, copied with it. dtype None: as the tensors are. The folder appears
    whole or not at all: everything is written beside it and renamed. Raises SpecError if a weight is missing, unknown or of
    another shape, if the family cannot express the model, or if the folder exists and `overwrite` is false. `overwrite`
    replaces nothing but an earlier export, and nothing that overlaps `source`, the folder the weights came from. Raises
    FolderError if the disk is full.
    """
    expect_trainable(model)
    _check_state(state, model)
    config = to_hf(model) | {"torch_dtype": str(dtype or next(iter(state.values())).dtype).removeprefix("torch.")}
    with fill_folder(Path(folder), is_ours=is_exported, overwrite=overwrite, source=source) as partial:
        special = copy_tokenizer(tokenizer, partial, max_length=model.max_position_embeddings) if tokenizer else {}
        _write_shards(state, model, partial, dtype, max_shard_bytes)
        _write_json(partial / "config.json", config | special)
        _write_json(partial / "generation_config.json", {"do_sample": True, **special})
    return Path(folder)


def is_exported(name: str) -> bool:
    """Whether `export_folder` writes files of this name."""
    known = (WEIGHTS_FILE, INDEX_FILE, "config.json", "generation_config.json", *TOKENIZER_FILES)
    return name in known or _SHARD_FILE.fullmatch(name) is not None


def import_folder(path: str | Path) -> tuple[Model, dict[str, Tensor]]:
    """The model of a Hugging Face folder and its weights under our names, in the dtype they are stored in.

    Raises SpecError naming every tensor that is missing, unknown, there twice, or of another shape or kind, files that
    cannot be read, and what brings a model that can be planned but not run.
    """
    folder = Path(path)
    model = from_hf(folder)
    expect_trainable(model)
    table = stored_weights(model)
    shapes = {weight.name: weight.shape for weight in weights(model)}
    state: dict[str, Tensor] = {}
    with ExitStack() as files:
        found = _open_tensors(folder, files)
        names = _match_names(found.keys(), table, model)
        problems = _compare(table, shapes, {names[name]: _shape(found[name], name) for name in names}, folder)
        problems += _unreadable(found, names, folder)
        if problems:
            raise SpecError(problems)
        for name, ours in names.items():
            state.update(_split(_read(found[name], name), table[ours], shapes))
        _check_tied_head(found, state, folder)
    return model, {weight.name: state[weight.name] for weight in weights(model)}


def _gpt2_name(name: str) -> str:
    if name == "lm_head.weight":
        return name
    stem, kind = name.rsplit(".", 1)
    prefix = "transformer."
    if stem.startswith("layers."):
        _, layer, stem = stem.split(".", 2)
        prefix = f"transformer.h.{layer}."
    if stem in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        return f"{prefix}attn.c_attn.{kind}"
    return f"{prefix}{_GPT2_NAMES[stem]}.{kind}"


def _check_state(state: Mapping[str, Tensor], model: Model) -> None:
    shapes = {weight.name: weight.shape for weight in weights(model)}
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
    sizes = {
        name: sum(state[part].numel() * (dtype or state[part].dtype).itemsize for part in stored.names)
        for name, stored in table.items()
    }
    shards = _pack(sizes, max_shard_bytes)
    file_of: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = WEIGHTS_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: _join(state, table[name], dtype) for name in names}, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(names, file)
    if len(shards) > 1:
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of})


def _pack(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Names in order, in groups of at most `max_bytes`; a larger tensor gets its own."""
    groups: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not groups or filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def _join(state: Mapping[str, Tensor], stored: Stored, dtype: torch.dtype | None) -> Tensor:
    parts = [state[name].detach().to("cpu", dtype or state[name].dtype) for name in stored.names]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (whole.t() if stored.transposed else whole).contiguous()


def _split(whole: Tensor, stored: Stored, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    whole = whole.t() if stored.transposed else whole
    parts = whole.split([shapes[name][0] for name in stored.names])
    for name, part in zip(stored.names, parts, strict=True):
        yield name, part.contiguous()


def _open_tensors(folder: Path, files: ExitStack) -> dict[str, Any]:
    """Every tensor's name and the open file that holds it."""
    found: dict[str, Any] = {}
    for file in _weight_files(folder):
        try:
            opened = files.enter_context(safe_open(file, framework="pt"))
        except FileNotFoundError:
            raise SpecError([Problem(str(file), f"is named by {INDEX_FILE} but not there", "Copy the whole folder.")]) from None
        except (SafetensorError, OSError) as error:
            raise SpecError([Problem(str(file), f"is no safetensors file: {error}", "Copy it again.")]) from None
        found |= dict.fromkeys(opened.keys(), opened)
    return found


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX_FILE).exists():
        try:
            index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
            return [folder / Path(name).name for name in sorted(set(index.values()))]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            rule = f"is no index of safetensors shards: {error!r}"
            raise SpecError([Problem(str(folder / INDEX_FILE), rule, "Copy it again.")]) from None
    if (folder / WEIGHTS_FILE).exists():
        return [folder / WEIGHTS_FILE]
    remedy = f"A folder with {WEIGHTS_FILE}, or with shards and {INDEX_FILE}, is needed."
    if list(folder.glob("*.bin")) or list(folder.glob("*.pt*")):
        remedy += " Pickle files are never read; save the model with safetensors first."
    raise SpecError([Problem(str(folder), "holds no safetensors weights", remedy)])


def _match_names(found: Any, table: Mapping[str, Stored], model: Model) -> dict[str, str]:
    """From the names in the file to those of `table`: files of the bare model lack its prefix."""
    prefix = "transformer." if model.model_type == "gpt2" else "model."
    names = {}
    for name in found:
        is_spare_head = name == "lm_head.weight" and model.tie_word_embeddings
        if not name.endswith(_DERIVED) and not is_spare_head:
            names[name] = name if name in table or prefix + name not in table else prefix + name
    return names


def _compare(
    table: Mapping[str, Stored], shapes: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], folder: Path
) -> list[Problem]:
    where, remedy = str(folder), "Check that weights and config.json belong together."
    expected = {name: _stored_shape(stored, shapes) for name, stored in table.items()}
    problems = [Problem(name, "is missing", remedy, where) for name in expected if name not in found]
    problems += [Problem(name, "is no weight of this model", remedy, where) for name in found if name not in expected]
    for name in expected.keys() & found.keys():
        if expected[name] != found[name]:
            rule = f"must have shape {expected[name]}, has {found[name]}"
            problems.append(Problem(name, rule, remedy, where))
    return problems


def _unreadable(found: Mapping[str, Any], names: Mapping[str, str], folder: Path) -> list[Problem]:
    """Tensors that are there twice, with and without the prefix, and those that are not plain floating point."""
    ours = list(names.values())
    problems = [
        Problem(name, f"is there a second time, as {names[name]}", "Keep one of the two.", str(folder))
        for name in names
        if name != names[name] and ours.count(names[name]) > 1
    ]
    for name in names:
        kind = found[name].get_slice(name).get_dtype()
        if kind not in _FLOATS:
            remedy = "Quantized weights cannot be trained; take the original ones."
            problems.append(Problem(name, f"must be one of {', '.join(_FLOATS)}, is {kind}", remedy, str(folder)))
    return problems


def _stored_shape(stored: Stored, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    parts = [shapes[name] for name in stored.names]
    shape = (sum(part[0] for part in parts), *parts[0][1:])
    return shape[::-1] if stored.transposed else shape


def _shape(file: Any, name: str) -> tuple[int, ...]:
    return tuple(file.get_slice(name).get_shape())


def _read(file: Any, name: str) -> Tensor:
    return file.get_tensor(name)


def _check_tied_head(found: Mapping[str, Any], state: Mapping[str, Tensor], folder: Path) -> None:
    """Some files of tied models repeat the embedding as the head; another head would be lost."""
    if "lm_head.weight" in found and "lm_head.weight" not in state:
        head = _read(found["lm_head.weight"], "lm_head.weight")
        if not torch.equal(head, state["embed_tokens.weight"]):
            rule = "differs from the embedding, but config.json ties them"
            raise SpecError([Problem("lm_head.weight", rule, "Set tie_word_embeddings to false there.", str(folder))])


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
