"""Uploads an exported folder to the Hugging Face Hub as a model, with a model card, through huggingface_hub.

Everything is uploaded in one commit: a download sees the complete model or none. An existing card is kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ultrascale import __version__
from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import num_parameters
from ultrascale.description.problems import mistake
from ultrascale.description.units import format_count

CARD = "README.md"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class HubError(RuntimeError):
    """The Hub could not be reached, or rejected a folder."""


def expect_pushable(repo: str, key: str = "--push-to-hub") -> None:
    """Raise SpecError naming `key`, before anything is written, if `repo` is not USER/NAME, or huggingface_hub or its token is
    missing."""
    if not _REPO.fullmatch(repo) or len(repo) > 96:
        rule = f"must be USER/NAME, is {repo!r}"
        raise mistake(key, rule, "Name the model as its address on the Hub has it.")
    try:
        from huggingface_hub import get_token
    except ImportError:
        remedy = "pip install huggingface_hub, or leave it out and upload the folder yourself."
        raise mistake(key, "needs huggingface_hub, which is not installed", remedy) from None
    if get_token() is None:
        raise mistake(key, "finds no key of the Hub", "Set HF_TOKEN, or run `hf auth login`.")


def push(folder: Path, repo: str, *, card: str, public: bool = False) -> str:
    """Upload the files of an exported folder as the model `repo`, created if missing, private unless `public`; returns its
    address.

    Raises HubError; the folder is not changed.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(library_name="ultrascale", library_version=__version__)
    try:
        address = str(api.create_repo(repo, private=not public, exist_ok=True))
        files = [CommitOperationAdd(path.name, path) for path in sorted(folder.iterdir()) if path.is_file()]
        if not api.file_exists(repo, CARD) and not (folder / CARD).exists():
            files.append(CommitOperationAdd(CARD, card.encode()))
        api.create_commit(repo, files, commit_message=f"Export of ultrascale {__version__}")
    except Exception as error:  # from whichever HTTP client huggingface_hub uses
        why = " ".join(str(error).split())[:300] or type(error).__name__
        problem = f"{folder} is written, but could not be pushed to {repo}: {why}"
        raise HubError(f"{problem}. Again, with nothing to export: hf upload {repo} {folder}") from error
    return address


def model_card(model: Model, repo: str, training: Mapping[str, str]) -> str:
    """Model card: the model's shape, how to load it, and what is known of its training. It contains no path or host name."""
    shape = {
        "parameters": format_count(num_parameters(model)),
        "architecture": model.model_type,
        "layers": f"{model.num_hidden_layers}",
        "hidden size": f"{model.hidden_size}",
        "attention heads": f"{model.num_attention_heads}, {model.num_key_value_heads} for keys and values",
        "vocabulary": f"{model.vocab_size:,}",
        "positions": f"{model.max_position_embeddings:,}",
    }
    if model.num_experts:
        shape["experts"] = f"{model.num_experts}, {model.num_experts_per_tok} a token"
    return "\n".join([
        "---", "library_name: transformers", "pipeline_tag: text-generation", "tags:", "- ultrascale", "---", "",
        f"# {model.name or model.model_type}", "",
        "A language model pretrained with ultrascale. It continues text; nobody has taught it to follow instructions or kept",
        "it from saying what is false or harmful.", "",
        "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
        'model = AutoModelForCausalLM.from_pretrained("' + repo + '")', "```", "",
        *_table("Model", shape), *(_table("Training", training) if training else []),
        "## Data, licence, evaluation", "", "Not stated yet: say here what it was trained on, under which licence it may be",
        "used, and how it was evaluated.", "",
    ])  # fmt: skip


def _table(title: str, rows: Mapping[str, str]) -> list[str]:
    return [f"## {title}", "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items()), ""]
