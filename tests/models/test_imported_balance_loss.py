"""The coefficient of a balance loss that a `config.json` names: kept for export, and applied by nobody who did not ask."""

import json
from dataclasses import replace

import pytest
import torch
from models.families import EXPERT_FAMILIES
from models.test_huggingface import random_decoder, reload_in_transformers, state_of

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.cli.main import main
from ultrascale.config.resolve import resolve, run_from_toml, to_toml
from ultrascale.config.rules.run_rules import run_notes
from ultrascale.data.indexed import ShardWriter
from ultrascale.description.run import Run
from ultrascale.models.decoder import Decoder
from ultrascale.models.experts import moe_layers, scale_auxiliary_losses, take_load
from ultrascale.models.files.huggingface import export_folder, import_folder

WITH_COEFFICIENT = [name for name in EXPERT_FAMILIES if not name.startswith(("deepseek", "glm"))]
"""Those whose loss transformers knows."""


def exported(name: str, folder, **changes):
    model = replace(EXPERT_FAMILIES[name], router_aux_loss_coef=0.9, **changes)
    return export_folder(state_of(random_decoder(model, torch.float32)), model, folder / "hf")


def attention_of(name: str) -> str:
    return "eager" if name.startswith("gpt-oss") else "sdpa"


@pytest.mark.parametrize("name", WITH_COEFFICIENT)
def test_routers_of_an_imported_model_have_the_gradient_of_transformers_default(name, tmp_path):
    folder = exported(name, tmp_path)
    theirs, (model, weights) = reload_in_transformers(folder, torch.float32, attention_of(name)), import_folder(folder)
    tokens = torch.randint(model.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    theirs(tokens, labels=tokens).loss.backward()
    ours = Decoder(model)
    ours.load_state_dict(weights)
    scale_auxiliary_losses(ours, 1 / (2 * 39))
    (ours(tokens, targets=targets) / (2 * 39)).backward()
    expected = [p.grad for n, p in theirs.named_parameters() if n.endswith((".router.weight", ".gate.weight"))]
    found = [layer.router.weight.grad for _, layer in moe_layers(ours)]
    assert len(found) == len(expected) > 0
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * max(g.abs().max().item() for g in expected))


@pytest.mark.parametrize("name", WITH_COEFFICIENT)
def test_of_one_sequence_and_layer_transformers_own_loss_is_k_times_ours(name, tmp_path):
    folder = exported(name, tmp_path, num_hidden_layers=1, first_k_dense_replace=0)
    model, weights = import_folder(folder)
    ours = Decoder(replace(model, router_aux_loss_scope="sequence"))
    ours.load_state_dict(weights)
    tokens = torch.randint(model.vocab_size, (1, 40), generator=torch.Generator().manual_seed(0))
    theirs = reload_in_transformers(folder, torch.float32, attention_of(name))
    ours(tokens, targets=tokens).backward()
    expected = theirs(tokens, labels=tokens, output_router_logits=True).aux_loss.item()
    assert take_load(ours)[1].item() / (0.9 * 40) * model.num_experts_per_tok == pytest.approx(expected, rel=1e-5)


def test_the_coefficient_of_a_file_is_written_again(tmp_path):
    folder = exported("gpt-oss", tmp_path)
    model, weights = import_folder(folder)
    assert model.balance_loss_coef == 0
    again = export_folder(weights, model, tmp_path / "again")
    assert {file.name: file.read_bytes() for file in again.iterdir()} == {f.name: f.read_bytes() for f in folder.iterdir()}


def test_a_run_that_names_a_scope_or_a_coefficient_has_the_loss_and_others_do_not(tmp_path):
    exported("qwen3-moe", tmp_path)

    def coefficient(**settings):
        run = resolve(
            None,
            {"model.path": str(tmp_path / "hf"), "batch.sequence_length": 16} | {f"model.{k}": v for k, v in settings.items()},
        ).run
        assert run_from_toml(to_toml(run)).model == run.model
        return run.model.balance_loss_coef

    assert coefficient() == 0
    assert coefficient(router_aux_loss_scope="sequence") == 0.9
    assert coefficient(router_aux_loss_coef=0.01) == 0.01
    assert coefficient(router_aux_loss_coef=0.01, router_aux_loss_scope="none") == 0


def test_presets_train_with_their_published_coefficient_and_gpt_oss_without_one():
    applied = {name: model.balance_loss_coef for name, model in PRESETS.items() if model.router_aux_loss_coef}
    published = {name: PRESETS[name].router_aux_loss_coef for name in applied if "gpt-oss" not in name}
    assert applied == published | dict.fromkeys(("gpt-oss-20b", "gpt-oss-120b", "tiny-gpt-oss"), 0.0)
    assert max(applied.values()) == 0.05


@pytest.mark.parametrize(
    "asked, told",
    [("", "note: model.router_aux_loss_coef = 0.9 is kept for export and not applied;"),
     ("router_aux_loss_coef = 0.01", "note: auxiliary losses join the gradient and not the loss that is told: "
                                     "model.router_aux_loss_coef = 0.01 over each sequence.")],
    ids=["as the file has it", "asked for"],
)  # fmt: skip
def test_a_run_that_goes_on_from_a_file_tells_at_its_start_whether_it_has_the_loss(tmp_path, capsys, asked, told):
    folder = exported("mixtral", tmp_path)
    writer = ShardWriter(tmp_path / "tokens", "uint16")
    writer.add_documents(torch.randint(97, (2000,)).numpy(), [500, 700, 800])
    writer.finish()
    (tmp_path / "run.toml").write_text(f"""
name = "continued"
folder = "{tmp_path}/out"
steps = 1
device = "cpu"
[model]
path = "{folder}"
{asked}
[batch]
sequence_length = 16
sequences_per_batch = 2
[data]
sources = ["{tmp_path}/tokens"]
[log]
memory_steps = 0
""")
    assert main(["import", str(folder), str(tmp_path / "run.toml")]) == 0
    assert main(["train", str(tmp_path / "run.toml")]) == 0
    assert told in capsys.readouterr().out
    row = json.loads((tmp_path / "out" / "continued" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (row["moe/auxiliary_loss"] > 0) is bool(asked)


def test_what_is_applied_and_what_is_not_is_told_in_a_sentence():
    def notes(preset, **changes):
        return [note for note in run_notes(Run(replace(PRESETS[preset], **changes))) if "loss" in note]

    (told,) = notes("tiny-gpt-oss")
    assert told.startswith("model.router_aux_loss_coef = 0.9 is kept for export and not applied")
    (told,) = notes("tiny-olmoe", router_z_loss_coef=0.1)
    assert "router_aux_loss_coef = 0.01 over each sequence, model.router_z_loss_coef = 0.1." in told
    assert notes("tiny-mixtral") == notes("tiny-llama") == []
