"""`ultrascale evaluate` beside the run's own evaluations, transformers, and bytes counted by hand."""

import json
import math
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from ultrascale.cli.main import main
from ultrascale.data.loader import Loader
from ultrascale.data.tokenizer import bytes_by_id
from ultrascale.description.run import Source
from ultrascale.train.evaluate import TOKENS_TOGETHER

LENGTH = 24
WORDS = "die größe des modells, 模型的大小, the size of the model; "


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A run of three steps, its corpora and its exported folder."""
    home = tmp_path_factory.mktemp("run")
    for kind, repeats in (("train", 40), ("held-out", 9)):
        (home / kind).mkdir()
        for number in range(repeats):
            (home / kind / f"{number}.txt").write_text(WORDS[number % 7 :] * (2 + number % 3) * (9 if kind == "train" else 1))
    prepare = ["data", "prepare", "--glob", "*.txt"]
    assert main([*prepare, str(home / "train"), "--train-tokenizer", "300", "--output", str(home / "tokens")]) == 0
    tokenizer = ["--tokenizer", str(home / "tokens" / "tokenizer.json")]
    assert main([*prepare, str(home / "held-out"), *tokenizer, "--output", str(home / "unseen")]) == 0
    (home / "run.toml").write_text(f"""
name = "run"
folder = "{home}/out"
steps = 3
device = "cpu"
[model]
preset = "tiny-llama"
vocab_size = 300
[layout]
precision = "fp32"
[batch]
sequence_length = {LENGTH}
sequences_per_batch = 2
[data]
sources = ["{home}/tokens"]
validation = ["{home}/unseen"]
[evaluation]
every_steps = 3
sequences = 7
[log]
memory_steps = 0
""")
    assert main(["train", str(home / "run.toml")]) == 0
    return home


def evaluated(capsys, *words: object) -> dict:
    capsys.readouterr()
    assert main(["evaluate", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_is_evaluated_as_it_evaluates_itself(home, capsys):
    measured = json.loads((home / "out" / "run" / "metrics.jsonl").read_text().splitlines()[-1])["val/loss"]
    result = evaluated(capsys, home / "out" / "run")
    assert (result["sequence_length"], [corpus["corpus"] for corpus in result["corpora"]]) == (LENGTH, [f"{home}/unseen"])
    (corpus,) = result["corpora"]
    assert corpus["sequences"] == 7
    assert corpus["loss"] == pytest.approx(measured, rel=1e-6)
    assert corpus["perplexity"] == pytest.approx(math.exp(measured), rel=1e-5)


def test_a_hugging_face_folder_is_evaluated_on_all_of_several_corpora_as_transformers_would(home, capsys):
    from transformers import AutoModelForCausalLM

    folder = home / "out" / "run" / "export"
    words = ("--sequence-length", LENGTH, "--document-mask", "false")
    result = evaluated(capsys, folder, home / "unseen", home / "tokens", *words)
    decoder = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = Tokenizer.from_file(str(home / "tokens" / "tokenizer.json"))
    for corpus, name in zip(result["corpora"], ("unseen", "tokens"), strict=True):
        loader = Loader((Source(f"{home}/{name}"),), sequence_length=LENGTH, vocab_size=300, seed=0, document_mask=False)
        (count,) = loader.sequences_per_epoch
        assert (count * LENGTH > TOKENS_TOGETHER) == (
            name == "tokens"
        )  # one corpus takes several passes, the last of them short
        read = loader.read(range(count))
        logits = decoder(torch.from_numpy(read.tokens)).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(read.targets).flatten())
        assert (corpus["sequences"], corpus["targets"]) == (count, count * LENGTH)
        assert corpus["loss"] == pytest.approx(loss.item(), rel=1e-6)
        _, places = loader.locate(range(count))
        in_order = np.concatenate([read.targets[row] for row in np.argsort(places)])
        text = tokenizer.decode(in_order.tolist(), skip_special_tokens=True)
        nats = loss.item() * corpus["targets"]
        cut = 3  # a character that the stream's first or last token splits is decoded as U+FFFD, of three bytes
        assert nats / math.log(2) / corpus["bits_per_byte"] == pytest.approx(len(text.encode()), abs=2 * cut)


def test_bytes_of_ids_are_those_of_the_text_that_they_stand_for(home, tmp_path):
    file = home / "tokens" / "tokenizer.json"
    sizes, tokenizer = bytes_by_id(file), Tokenizer.from_file(str(file))
    ids = tokenizer.encode(WORDS).ids
    assert sum(sizes[number] for number in ids) == len(WORDS.encode())
    assert [sizes[number] for number, token in tokenizer.get_added_tokens_decoder().items() if token.special] == [0]
    pieces = ["<unk>", "\u2581the", "größe", "<0xE6>", "<0xA8>", "\u2581"]
    sentencepiece = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True))
    sentencepiece.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    sentencepiece.add_special_tokens(["<unk>"])
    sentencepiece.add_tokens(["[größe]"])
    sentencepiece.save(str(tmp_path / "tokenizer.json"))
    assert bytes_by_id(tmp_path / "tokenizer.json") == {0: 0, 1: 4, 2: 7, 3: 1, 4: 1, 5: 1, 6: 9}
    wordpiece = Tokenizer(models.WordPiece({"[UNK]": 0, "##ing": 1}, unk_token="[UNK]"))
    wordpiece.decoder = decoders.WordPiece()
    wordpiece.save(str(tmp_path / "tokenizer.json"))
    assert bytes_by_id(tmp_path / "tokenizer.json") == {}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("{export}",), "names no validation data"),
        (("{run}", "{home}/train"), "is not a folder of prepared text"),
        (("{run}", "--sequence-length", "99999"), "but the model's context is"),
        (("{run}", "--seq-len", "32"), "Did you mean --sequence-length?"),
        (("{run}", "--sequences", "0"), "must be at least 1, is 0"),
        (("{home}/train", "{home}/unseen"), "neither config.json with weights nor a checkpoint"),
        (("{export}", "{home}/other", "--sequence-length", "24"), "another tokenizer"),
    ],
)
def test_what_cannot_be_evaluated_says_why_and_exits_with_2(home, capsys, words, told):
    if not (home / "other").exists():
        copytree(home / "unseen", home / "other")
        file = home / "other" / "tokenizer.json"
        known = json.loads(file.read_text())
        vocabulary = known["model"]["vocab"]
        one, two = list(vocabulary)[40:42]
        vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
        file.write_text(json.dumps(known))
    places = {"home": home, "run": home / "out" / "run", "export": home / "out" / "run" / "export"}
    assert main(["evaluate", *(word.format(**places) for word in words)]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_a_corpus_that_lost_the_tokenizer_of_others_is_refused_too(home, tmp_path, capsys):
    folder = Path(copytree(home / "unseen", tmp_path / "unseen"))
    (folder / "tokenizer.json").unlink()
    assert evaluated(capsys, home / "out" / "run", folder)["corpora"][0]["bits_per_byte"] is not None
    manifest = folder / "manifest.json"
    known = json.loads(manifest.read_text())
    known["tokenizer"]["fingerprint"] = "0" * 64
    manifest.write_text(json.dumps(known))
    assert main(["evaluate", str(home / "out" / "run"), str(folder)]) == 2
    assert "has lost its tokenizer.json" in capsys.readouterr().err


def test_weights_that_are_not_finite_have_no_loss(home, capsys, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = Path(copytree(home / "out" / "run" / "export", tmp_path / "broken"))
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (corpus,) = evaluated(capsys, folder, home / "unseen", "--sequence-length", LENGTH)["corpora"]
    assert (corpus["loss"], corpus["perplexity"], corpus["bits_per_byte"]) == (None, None, None)
    assert main(["evaluate", str(folder), f"{home}/unseen", "--sequence-length", str(LENGTH)]) == 0
    assert "no finite loss" in capsys.readouterr().out
