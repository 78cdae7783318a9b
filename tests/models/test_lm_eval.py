"""The recipe of docs/trackers.md: EleutherAI's harness on an export, with a task that downloads nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.data.tokenizer import train_tokenizer
from ultrascale.models.decoder import Decoder
from ultrascale.models.files.huggingface import export_folder
from ultrascale.models.initialise import initialise

PAGE = Path(__file__).parents[2] / "docs" / "trackers.md"
TEXTS = ["The cat sat on the mat, and the dog ran.", "A rank sends what another one waits for."]
MODEL = PRESETS["tiny-llama"]


def bits_of(decoder: Decoder, tokenizer: Tokenizer, text: str) -> float:
    """Minus the log of a text's probability after the end of another, in bits."""
    ids = tokenizer.encode(text).ids
    ids = [tokenizer.token_to_id("<|endoftext|>"), *ids]
    with torch.no_grad():
        loss = decoder(torch.tensor([ids[:-1]]), targets=torch.tensor([ids[1:]]))
    return float(loss) / torch.log(torch.tensor(2.0)).item()


@pytest.mark.timeout(900)
def test_the_harness_finds_the_bits_per_byte_that_our_own_loss_says(tmp_path):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    train_tokenizer(TEXTS, 300).save(str(tmp_path / "tokenizer.json"))
    decoder = Decoder(MODEL)
    initialise(decoder, MODEL, seed=0)
    export_folder(decoder.state_dict(), MODEL, tmp_path / "exported", tokenizer=tmp_path / "tokenizer.json")
    (task,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "held_out.yaml").write_text(task)
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    words = [
        sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", "pretrained=exported,dtype=float32", "--tasks",
        "held_out", "--include_path", ".", "--device", "cpu", "--output_path", "found.json",
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(words, cwd=tmp_path, env=os.environ | offline, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (report,) = [path for path in tmp_path.rglob("*.json") if path.name.startswith(("found", "results"))]
    found = json.loads(report.read_text())["results"]["held_out"]["bits_per_byte,none"]
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    bits = sum(bits_of(decoder, tokenizer, text) for text in TEXTS)
    assert found == pytest.approx(bits / sum(len(text.encode()) for text in TEXTS), rel=1e-4)
