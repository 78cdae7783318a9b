import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from shutil import copyfile, copytree

import pytest
import torch
from tokenizers import Tokenizer

from ultrascale.cli.main import main
from ultrascale.config.rules.early import sees_gpu
from ultrascale.data.indexed import ShardWriter
from ultrascale.data.tokenizer import train_tokenizer
from ultrascale.description.architecture.model import Model
from ultrascale.models.decoder import Decoder
from ultrascale.models.files.huggingface import export_folder, import_folder
from ultrascale.models.initialise import initialise

MODEL = Model(
    vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=64, initializer_range=0.2,
)  # fmt: skip
PROMPT = "the model says: größe 模型"


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """A Hugging Face folder with a byte-level tokenizer."""
    home = tmp_path_factory.mktemp("exported")
    train_tokenizer(["the model says what the model says"] * 3, 280).save(str(home / "tokenizer.json"))
    decoder = Decoder(MODEL)
    initialise(decoder, MODEL, seed=0)
    state = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    return export_folder(state, MODEL, home / "hf", tokenizer=home / "tokenizer.json")


@pytest.fixture
def run_file(exported, tmp_path) -> Path:
    """A run that goes on from the exported folder, on random tokens."""
    writer = ShardWriter(tmp_path / "tokens", "uint16")
    writer.add_documents(torch.randint(300, (2000,)).numpy(), [500, 700, 800])
    writer.finish()
    text = f"""
name = "continued"
folder = "{tmp_path}/out"
steps = 1
device = "cpu"
[model]
path = "{exported}"
[batch]
sequence_length = 16
sequences_per_batch = 2
[data]
sources = ["{tmp_path}/tokens"]
tokenizer = "{exported}/tokenizer.json"
[log]
memory_steps = 0
"""
    (tmp_path / "run.toml").write_text(text)
    return tmp_path / "run.toml"


def generated(capsys, *words: str) -> dict:
    assert main(["generate", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_generate_prints_the_prompt_and_what_follows_as_json_tells_it(exported, capsys):
    words = [str(exported), "--prompt", PROMPT, "--max-new-tokens", "12", "--temperature", "0.9"]
    found = generated(capsys, *words)
    assert len(found["tokens"]) == 12
    assert main(["generate", *words]) == 0
    assert capsys.readouterr().out == PROMPT + found["text"] + "\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_no_control_characters_of_text_and_a_file_gets_all(exported, capsys):
    words = ["generate", str(exported), "--prompt", "the \x1b[2Jmodel\n", "--max-new-tokens", "1"]
    assert main(words) == 0
    assert "the \x1b[2Jmodel\n" in capsys.readouterr().out
    with redirect_stdout(Terminal()) as terminal:
        assert main(words) == 0
    assert "the \\x1b[2Jmodel\n" in terminal.getvalue()


@pytest.mark.parametrize(
    "change, words, message",
    [
        (lambda f: (f / "tokenizer.json").unlink(), (), "Name a tokenizer.json with --tokenizer"),
        (lambda f: (f / "model.safetensors").unlink(), (), "holds no safetensors weights"),
        (lambda f: (f / "config.json").unlink(), (), "neither config.json with weights nor a checkpoint"),
        (lambda f: None, ("--prompt", "x" * 200), "leaves no room for more"),
        (lambda f: None, ("--temperature", "-1"), "temperature"),
        (lambda f: None, ("--tokenizer", "nowhere/tokenizer.json"), "nowhere/tokenizer.json"),
    ],
)
def test_what_cannot_be_generated_from_says_why_and_exits_with_2(exported, tmp_path, capsys, change, words, message):
    folder = Path(copytree(exported, tmp_path / "copy"))
    change(folder)
    assert main(["generate", str(folder), "--prompt", "the", *words]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def tokenizer_with(more: int, file: Path) -> Path:
    tokenizer = train_tokenizer(["the model says"], 280)
    tokenizer.add_tokens([f"[{i}]" for i in range(more)])
    tokenizer.save(str(file))
    return file


@pytest.mark.parametrize(
    ("more", "told"),
    [(60, "but the model's vocabulary has 300"), (1, "is not the tokenizer of"), (0, "is not the tokenizer of")],
)
def test_a_tokenizer_that_is_not_the_models_is_refused_before_anything_is_printed(exported, tmp_path, capsys, more, told):
    other = tokenizer_with(more, tmp_path / "tokenizer.json")
    assert main(["generate", str(exported), "--prompt", "the", "--tokenizer", str(other)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err


def test_a_tokenizer_other_than_that_of_the_runs_data_is_refused(exported, run_file, capsys):
    source = json.dumps({"fingerprint": "0" * 64, "vocab_size": 280, "eod_token": "<|endoftext|>", "eod_id": 0})
    assert main(["import", str(exported), str(run_file), "--json"]) == 0
    checkpoint = json.loads(capsys.readouterr().out)["checkpoint"]
    folder = run_file.parent / "tokens"
    folder.mkdir(exist_ok=True)
    manifest = f'{{"format": "ultrascale-data-1", "dtype": "uint16", "tokenizer": {source}, "shards": [], "request": {{}}}}'
    (folder / "manifest.json").write_text(manifest)
    assert main(["generate", checkpoint, "--prompt", "the"]) == 2
    assert "its fingerprint differs" in capsys.readouterr().err


def test_a_vocabulary_larger_than_the_tokenizers_is_told_and_used(exported, capsys):
    ids = len(json.loads((exported / "tokenizer.json").read_text())["model"]["vocab"])
    assert ids < 300
    assert main(["generate", str(exported), "--prompt", "the", "--max-new-tokens", "1"]) == 0
    assert f"has {ids} ids, the model 300" in capsys.readouterr().err


def test_all_mistakes_of_sampling_are_told_together_and_before_the_prompt(exported, capsys):
    words = [
        "--temperature",
        "nan",
        "--top-p",
        "1.5",
        "--top-k",
        "0",
        "--max-new-tokens",
        "0",
        "--seed",
        "-1",
        "--device",
        "cuda",
    ]
    assert main(["generate", str(exported), "--prompt", "a\udcff", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    for key in (
        "6 mistakes" if sees_gpu() else "7 mistakes",
        "--temperature\n",
        "--top-p\n",
        "--top-k\n",
        "--max-new-tokens\n",
        "--seed\n",
        "" if sees_gpu() else "--device\n    asks for CUDA",
        "character 2 is not",
    ):
        assert key in err


def test_a_closed_stdout_is_no_error(exported):
    with redirect_stdout(None):  # as Python has it then
        assert main(["generate", str(exported), "--prompt", "the", "--max-new-tokens", "2"]) == 0


def test_a_full_context_is_told_on_stderr(exported, capsys):
    words = ["generate", str(exported), "--prompt", "the", "--tokenizer", str(exported / "tokenizer.json"), "--max-new-tokens"]
    assert main([*words, "2"]) == 0
    assert "stopped" not in capsys.readouterr().err
    assert main([*words, "5000", "--json"]) == 0
    assert "stopped: the model's context of 64 tokens is full\n" in capsys.readouterr().err


def test_a_temperature_too_small_to_divide_by_takes_the_likeliest(exported, capsys):
    words = [str(exported), "--prompt", PROMPT, "--max-new-tokens", "8", "--temperature"]
    assert generated(capsys, *words, "1e-40") == generated(capsys, *words, "0")


@pytest.mark.parametrize("verb", ["generate", "export"])
def test_an_older_checkpoint_is_not_used_in_silence(exported, run_file, capsys, verb):
    assert main(["import", str(exported), str(run_file)]) == 0
    run = run_file.parent / "out" / "continued"
    newest = Path(copytree(run / "checkpoints" / "step-00000000", run / "checkpoints" / "step-00000007"))
    (newest / "manifest.json").write_text("{}")
    capsys.readouterr()
    more = {"generate": ["--prompt", "the"], "export": [str(run_file.parent / "hf")]}[verb]
    assert main([verb, str(run), *more]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
    assert len(told) == 1
    assert told[0].startswith("ultrascale: step-00000007 is damaged, using step-00000000 instead: ")


def test_import_makes_the_folder_the_start_of_a_run_and_export_gives_the_same_bits_back(exported, run_file, capsys):
    assert main(["import", str(exported), str(run_file), "--json"]) == 0
    checkpoint = json.loads(capsys.readouterr().out)["checkpoint"]
    out = run_file.parent / "again"
    assert main(["export", checkpoint, str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokenizer"] is True
    (model, before), (again, after) = import_folder(exported), import_folder(out)
    assert (model.hidden_size, list(before)) == (again.hidden_size, list(after))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert generated(capsys, checkpoint, "--prompt", PROMPT) | {"source": ""} == (
        generated(capsys, str(exported), "--prompt", PROMPT) | {"source": ""}
    )


def test_import_names_the_files_of_a_chat_model_that_data_were_prepared_without(exported, run_file, capsys):
    chat, beside = (Path(copytree(exported, run_file.parent / name)) for name in ("chat", "beside"))
    (chat / "chat_template.jinja").write_text("{{ messages[0].content }}")
    run_file.write_text(run_file.read_text().replace(f'tokenizer = "{exported}', f'tokenizer = "{beside}'))
    assert main(["import", str(chat), str(run_file)]) == 0
    told = capsys.readouterr().err
    assert f"exports will be without the chat_template.jinja of {chat}, which the data were prepared without" in told
    assert told.endswith(f"copy them beside {beside}/tokenizer.json.\n")
    copyfile(chat / "chat_template.jinja", beside / "chat_template.jinja")
    assert main(["import", str(chat), str(run_file), "--name", "kept"]) == 0
    assert "exports will be" not in capsys.readouterr().err
    assert main(["export", str(run_file.parent / "out" / "kept"), str(run_file.parent / "again")]) == 0
    assert (run_file.parent / "again" / "chat_template.jinja").exists()


@pytest.mark.parametrize(("text", "code"), [("the model says what the model says", 0), ("quite another text, another text", 2)])
def test_import_refuses_data_whose_ids_stand_for_other_tokens_than_the_folders(exported, run_file, capsys, text, code):
    home = run_file.parent
    (home / "text.txt").write_text("the model says " * 100)
    train_tokenizer([text] * 3, 280).save(str(home / "another.json"))
    words = ["--tokenizer", str(home / "another.json"), "--output", str(home / "prepared"), "--workers", "1"]
    assert main(["data", "prepare", str(home / "text.txt"), *words]) == 0
    run_file.write_text(run_file.read_text().replace(f"{home}/tokens", f"{home}/prepared").replace("tokenizer =", "# "))
    assert main(["import", str(exported), str(run_file)]) == code
    error = capsys.readouterr().err
    assert ("was prepared with another tokenizer than that of" in error) == (code == 2)
    assert not code or f"data prepare TEXT --tokenizer {exported}/tokenizer.json" in error
    assert (home / "out").exists() == (code == 0)


def test_a_chat_model_keeps_its_template_and_the_ends_of_its_texts_from_import_to_export(exported, run_file, capsys):
    home = run_file.parent
    chat = Path(copytree(exported, home / "chat"))
    tokenizer = Tokenizer.from_file(str(chat / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.save(str(chat / "tokenizer.json"))
    turn, document = (tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>"))
    (chat / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}')
    (chat / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    (home / "text.txt").write_text("the model says " * 100)
    words = ["--tokenizer", str(chat), "--output", str(home / "prepared"), "--workers", "1"]
    assert main(["data", "prepare", str(home / "text.txt"), *words]) == 0
    text = run_file.read_text().replace(f"{home}/tokens", f"{home}/prepared").replace("tokenizer =", "# ")
    run_file.write_text(text.replace(str(exported), str(chat)))
    assert main(["import", str(chat), str(run_file)]) == 0
    assert "exports will be without" not in capsys.readouterr().err
    assert main(["train", str(run_file), "--checkpoint.store", f"file://{home}/store"]) == 0
    for run, folder in ((home / "out" / "continued", home / "again"), (f"file://{home}/store/continued", home / "from-store")):
        assert main(["export", str(run), str(folder)]) == 0
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (folder / name).read_bytes() == (chat / name).read_bytes()
    config, generation = (json.loads((home / "again" / f"{name}config.json").read_text()) for name in ("", "generation_"))
    assert (config["eos_token_id"], generation["eos_token_id"]) == (turn, [turn, document])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_folder_is_exported_in_its_own_dtype_to_the_same_bytes_unless_another_is_asked_for(
    exported, run_file, capsys, dtype
):
    home = run_file.parent
    narrow = export_folder(import_folder(exported)[1], MODEL, home / "narrow", tokenizer=exported, dtype=dtype)
    run_file.write_text(run_file.read_text().replace(str(exported), str(narrow)))
    assert main(["import", str(narrow), str(run_file), "--json"]) == 0
    checkpoint = json.loads(capsys.readouterr().out)["checkpoint"]
    assert main(["export", checkpoint, str(home / "again")]) == 0
    assert f"{str(dtype)[6:]} is what the run was imported from; --precision fp32" in capsys.readouterr().out
    for name in ("model.safetensors", "config.json"):
        assert (home / "again" / name).read_bytes() == (narrow / name).read_bytes()
    assert main(["train", str(run_file)]) == 0
    run = home / "out" / "continued"
    assert main(["export", str(run), str(home / "wide"), "--precision", "fp32"]) == 0
    wide, after = import_folder(home / "wide")[1], import_folder(run / "export")[1]
    assert {weight.dtype for weight in wide.values()} == {torch.float32}
    assert {weight.dtype for weight in after.values()} == {dtype}
    assert all(torch.equal(weight.to(dtype), after[name]) for name, weight in wide.items())


def test_training_goes_on_from_an_imported_folder_and_generate_reads_the_run(exported, run_file, capsys):
    assert main(["import", str(exported), str(run_file)]) == 0
    assert main(["train", str(run_file)]) == 0
    assert "resumed from" in capsys.readouterr().out
    found = generated(capsys, str(run_file.parent / "out" / "continued"), "--prompt", "the")
    assert found["source"].endswith("step-00000001")
    before, after = (import_folder(f)[1] for f in (exported, run_file.parent / "out" / "continued" / "export"))
    moved = {name: (after[name] - before[name]).abs().max().item() for name in before}
    assert 0 < max(moved.values()) < 1e-3  # one step of AdamW moves a weight by about the learning rate


def test_a_new_run_of_a_folder_with_weights_says_that_it_begins_at_random_and_an_imported_one_does_not(
    exported, run_file, capsys
):
    assert main(["train", str(run_file), "--name", "other"]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: weights begin at random")]
    assert len(notes) == 1
    assert f"`ultrascale import {exported} {run_file} --name other` begins from those in {exported}" in notes[0]
    assert main(["import", str(exported), str(run_file)]) == 0
    assert main(["train", str(run_file)]) == 0
    assert "begin at random" not in capsys.readouterr().out


def test_the_runs_folder_can_be_given_to_import_as_to_train(exported, run_file, capsys):
    place = run_file.parent / "elsewhere"
    assert main(["import", str(exported), str(run_file), "--folder", str(place)]) == 0
    assert (place / "continued" / "checkpoints").is_dir()


def test_the_first_train_of_an_imported_run_reports_no_change_that_nobody_made(exported, run_file, capsys):
    text, prepared = run_file.parent / "text.jsonl", run_file.parent / "prepared"
    text.write_text('{"text": "the model says what the model says"}\n' * 99)
    words = ["--tokenizer", str(exported / "tokenizer.json"), "--validation-fraction", "0.4", "--workers", "1"]
    assert main(["data", "prepare", str(text), *words, "--output", str(prepared)]) == 0
    settings = ["--steps", "20", "--data.sources", str(prepared)]
    assert main(["import", str(exported), str(run_file), *settings]) == 0
    assert main(["train", str(run_file), *settings]) == 0
    told = capsys.readouterr().out
    assert (
        "warm-up: 1 of 20 steps" in told and f"validation: {prepared}" in told and "resumed from" in told and "(was" not in told
    )


def test_import_refuses_another_model_by_field_and_a_run_with_checkpoints(exported, run_file, capsys):
    text = run_file.read_text()
    run_file.write_text(text.replace("[batch]", "rope_theta = 5e5\n[batch]"))
    assert main(["import", str(exported), str(run_file)]) == 2
    assert "model.rope_theta" in capsys.readouterr().err
    run_file.write_text(text)
    assert main(["import", str(exported), str(run_file)]) == 0
    assert main(["import", str(exported), str(run_file)]) == 2
    assert "has checkpoints already" in capsys.readouterr().err


def test_export_never_replaces_the_run_or_model_it_reads(exported, run_file, capsys):
    assert main(["import", str(exported), str(run_file)]) == 0
    run = run_file.parent / "out" / "continued"
    before = sorted(run.rglob("*"))
    assert main(["export", str(run), str(run), "--overwrite"]) == 2
    assert main(["export", str(run), str(run.parent), "--overwrite"]) == 2
    assert capsys.readouterr().err.count("is or contains the source") == 2
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize("gb", ["nan", "0", "-1", "inf"])
def test_a_shard_size_that_is_no_size_is_refused(exported, tmp_path, capsys, gb):
    assert main(["export", str(exported), str(tmp_path / "out"), "--max-shard-gb", gb]) == 2
    assert "must be a number above 0" in capsys.readouterr().err
