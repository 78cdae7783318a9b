import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from models.families import DEEPSEEK_V3, EXPERT_FAMILIES, FAMILIES, LLAMA
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import num_parameters
from ultrascale.description.problems import SpecError
from ultrascale.models.decoder import Decoder
from ultrascale.models.files.huggingface import export_folder, import_folder
from ultrascale.models.files.stored import StoredTensor, stored_weights
from ultrascale.models.initialise import initialise

transformers = pytest.importorskip("transformers")


def random_decoder(model: Model, dtype: torch.dtype) -> Decoder:
    """Norms and biases are shaken too: at one and zero they would hide a mistake."""
    decoder = Decoder(model)
    initialise(decoder, model, seed=5)
    generator = torch.Generator().manual_seed(6)
    for parameter in decoder.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    for buffer in decoder.buffers():
        buffer += 0.2 * torch.randn(buffer.shape, generator=generator)
    return decoder.to(dtype)


def state_of(decoder: Decoder) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in decoder.state_dict().items()}


def reload_in_transformers(folder, dtype: torch.dtype, attention: str = "sdpa"):
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    if dtype == torch.float64:
        widen_norms(theirs)
    return theirs.train()


def widen_norms(theirs) -> None:
    """transformers rounds to fp32 inside every RMSNorm, whatever the model's dtype; nothing else of it stays below fp64."""
    for module in theirs.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_wide_norm, module)


def _wide_norm(module, x):
    if "Gemma" in type(module).__name__:
        return F.rms_norm(x, module.weight.shape, 1 + module.weight, module.eps)
    return F.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def compare_with_transformers(model: Model, dtype: torch.dtype, tolerance: float, folder, attention: str = "sdpa") -> None:
    """Logits and every gradient, ours read as the tensors of the file, theirs joined as transformers holds experts."""
    ours = random_decoder(model, dtype)
    theirs = reload_in_transformers(export_folder(state_of(ours), model, folder / "hf"), dtype, attention)
    tokens = torch.randint(model.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1)

    logits, expected = ours(tokens), theirs(tokens, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance * expected.abs().max().item())

    ours(tokens, targets=targets).backward()
    loss_of(expected, targets).backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters() if parameter.grad is not None}
    table, compared = stored_weights(model), set()
    for name, parameter in theirs.named_parameters():
        name = name.replace(".mlp.", ".block_sparse_moe.") if model.model_type == "mixtral" else name
        found = {name: table[name]} if name in table else experts_of(name, table)
        parts = {stored: stored.join(gradients) for stored in found.values()}
        whole = parts[found[name]] if name in found else joined_experts(parts, parameter.shape)
        torch.testing.assert_close(whole, parameter.grad, rtol=0, atol=tolerance * parameter.grad.abs().max().item(), msg=name)
        compared |= {ours for stored in found.values() for ours in stored.names}
    assert compared == gradients.keys() == {name for name, _ in ours.named_parameters()}
    assert sum(p.numel() for p in theirs.parameters()) == num_parameters(model)


def experts_of(name: str, table: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a file that transformers joins to its parameter `...experts.gate_up_proj` or `...experts.down_proj`."""
    block, _, projection = name.rpartition(".experts.")
    theirs = {"gate_up_proj": (".gate_proj.", ".up_proj.", ".w1.", ".w3."), "down_proj": (".down_proj.", ".w2.")}[projection]
    return {one: stored for one, stored in table.items() if f"{block}.experts." in one and any(part in one for part in theirs)}


def joined_experts(parts: dict[StoredTensor, torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """[X, F or 2F, D]: by expert, gate before up."""
    experts: dict[int | None, list[torch.Tensor]] = {}
    for stored, tensor in sorted(parts.items(), key=lambda pair: "up_proj" in pair[0].names[0]):
        experts.setdefault(stored.expert, []).append(tensor)
    return torch.stack([torch.cat(experts[number]) for number in range(shape[0])])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-11)], ids=["fp32", "fp64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_every_gradient_equal_transformers_reading_our_export(family, dtype, tolerance, tmp_path):
    compare_with_transformers(FAMILIES[family], dtype, tolerance, tmp_path)


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_logits_and_every_gradient_of_models_with_experts_equal_transformers_in_fp32(family, tmp_path):
    """In fp32 alone: whatever the model's dtype, transformers rounds router scores to fp32."""
    attention = "eager" if family.startswith("gpt-oss") else "sdpa"  # sinks
    compare_with_transformers(EXPERT_FAMILIES[family], torch.float32, 1e-5, tmp_path, attention)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000], ids=["one file", "shards"])
@pytest.mark.parametrize(
    "family",
    [
        "gpt2", "llama3-scaling", "llama-yarn", "mistral", "qwen2-window", "smollm3", "olmo2", "olmo3", "gemma3",
        *EXPERT_FAMILIES,
    ],
)  # fmt: skip
def test_export_then_import_is_bit_equal(family, max_shard_bytes, tmp_path):
    model = (FAMILIES | EXPERT_FAMILIES)[family]
    state = state_of(random_decoder(model, torch.bfloat16))
    folder = export_folder(state, model, tmp_path / "hf", max_shard_bytes=max_shard_bytes)
    assert (folder / "model.safetensors.index.json").exists() == (max_shard_bytes == 20_000)
    found, restored = import_folder(folder)
    assert replace(found, name="") == model
    assert restored.keys() == state.keys()
    assert all(torch.equal(restored[name], state[name]) for name in state)


def test_prediction_blocks_go_out_with_copies_of_embedding_and_head_as_in_deepseeks_files_and_come_back(tmp_path):
    model = replace(DEEPSEEK_V3, num_nextn_predict_layers=1)
    state = state_of(random_decoder(model, torch.float32))
    folder = export_folder(state, model, tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    block = "model.layers.3."
    assert {f"{block}{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")} <= tensors.keys()
    assert torch.equal(tensors[f"{block}embed_tokens.weight"], state["embed_tokens.weight"])
    assert torch.equal(tensors[f"{block}shared_head.head.weight"], state["lm_head.weight"])
    found, restored = import_folder(folder)
    assert found.num_nextn_predict_layers == 1
    assert all(torch.equal(restored[name], state[name]) for name in state)

    ours, tokens = Decoder(found), torch.arange(30)[None] % model.vocab_size
    ours.load_state_dict(restored)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)  # which leaves prediction blocks out
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)

    tensors[f"{block}shared_head.head.weight"] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(SpecError, match=r"shared_head\.head\.weight.*differs from lm_head\.weight"):
        import_folder(folder)


def test_the_bias_that_balances_load_goes_out_in_full_whatever_the_rest_is_cast_to(tmp_path):
    decoder = random_decoder(DEEPSEEK_V3, torch.float32)
    folder = export_folder(state_of(decoder), DEEPSEEK_V3, tmp_path / "hf", dtype=torch.bfloat16)
    name = "layers.1.mlp.router.e_score_correction_bias"
    stored = load_file(folder / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert stored.dtype == torch.float32 and torch.equal(stored, decoder.state_dict()[name])


@pytest.mark.parametrize(
    "family",
    [
        "gpt2",
        "llama3-scaling",
        "qwen2-tied",
        "qwen3",
        "smollm3",
        "olmo2",
        "olmo3",
        "gemma3",
        "mixtral",
        "olmoe",
        "deepseek-v3",
        "gpt-oss",
    ],
)
def test_what_transformers_saves_is_read_with_equal_logits(family, tmp_path):
    model = (FAMILIES | EXPERT_FAMILIES)[family]
    first = export_folder(state_of(random_decoder(model, torch.float32)), model, tmp_path / "first")
    theirs = reload_in_transformers(first, torch.float32, "eager" if family == "gpt-oss" else "sdpa")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    found, state = import_folder(tmp_path / "theirs")
    ours = Decoder(found)
    ours.load_state_dict(state)
    tokens = torch.arange(30)[None] % model.vocab_size
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


def test_files_of_the_bare_model_with_derived_tables_and_a_repeated_tied_head_are_read(tmp_path):
    model = FAMILIES["gpt2"]
    folder = export_folder(state_of(random_decoder(model, torch.float32)), model, tmp_path / "hf")
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(folder / "model.safetensors").items()}
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "lm_head.weight": tensors["wte.weight"].clone()}
    save_file(tensors, folder / "model.safetensors")
    _, state = import_folder(folder)
    assert torch.equal(state["embed_tokens.weight"], tensors["wte.weight"])
    tensors["lm_head.weight"] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(SpecError, match=r"lm_head\.weight.*differs from the embedding"):
        import_folder(folder)


def test_every_missing_unknown_and_misshapen_tensor_is_named(tmp_path):
    folder = export_folder(state_of(random_decoder(LLAMA, torch.float32)), LLAMA, tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.extra"] = torch.ones(1)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:5].clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(SpecError) as raised:
        import_folder(folder)
    assert sorted((problem.key, problem.rule) for problem in raised.value.problems) == [
        ("lm_head.weight", "must have shape (97, 32), has (5, 32)"),
        ("model.extra", "is no weight of this model"),
        ("model.norm.weight", "is missing"),
    ]


def test_a_folder_that_transformers_saved_without_prediction_blocks_is_refused_by_its_key(tmp_path):
    """It saves `num_nextn_predict_layers` of DeepSeek-V3 and GLM-4.5 as it was read, and no weight of these blocks."""
    from transformers import AutoModelForCausalLM

    model = replace(DEEPSEEK_V3, num_nextn_predict_layers=1)
    folder = export_folder(state_of(random_decoder(model, torch.float32)), model, tmp_path / "hf")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    with pytest.raises(SpecError, match=r"^num_nextn_predict_layers \(from .*saved\): is 1, but no weight .* Set it to 0"):
        import_folder(tmp_path / "saved")
    config = tmp_path / "saved" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 0}))
    assert import_folder(tmp_path / "saved")[0].num_nextn_predict_layers == 0


def test_quantized_tensors_and_tensors_that_are_there_twice_are_named(tmp_path):
    folder = export_folder(state_of(random_decoder(LLAMA, torch.float32)), LLAMA, tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"] = tensors["model.norm.weight"].clone()
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(SpecError) as raised:
        import_folder(folder)
    assert sorted((problem.key, problem.rule) for problem in raised.value.problems) == [
        ("lm_head.weight", "must be one of F64, F32, BF16, F16, is I8"),
        ("norm.weight", "is there a second time, as model.norm.weight"),
    ]


def test_a_folder_with_pickles_only_is_refused(tmp_path):
    folder = export_folder(state_of(random_decoder(LLAMA, torch.float32)), LLAMA, tmp_path / "hf")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(SpecError, match="`ultrascale convert SOURCE FOLDER` alone"):
        import_folder(folder)


def test_a_damaged_or_absent_shard_is_named(tmp_path):
    state = state_of(random_decoder(LLAMA, torch.float32))
    folder = export_folder(state, LLAMA, tmp_path / "hf", max_shard_bytes=20_000)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(SpecError, match=shard.name):
        import_folder(folder)
    shard.unlink()
    with pytest.raises(SpecError, match=f"{shard.name}.*not there"):
        import_folder(folder)


def test_an_export_never_replaces_a_folder_unasked_and_leaves_nothing_when_it_fails(tmp_path):
    state = state_of(random_decoder(LLAMA, torch.float32))
    folder = export_folder(state, LLAMA, tmp_path / "hf")
    with pytest.raises(SpecError, match="exists already"):
        export_folder(state, LLAMA, folder)
    export_folder(state, LLAMA, folder, dtype=torch.bfloat16, overwrite=True)
    assert import_folder(folder)[1]["norm.weight"].dtype == torch.bfloat16
    with pytest.raises(SpecError, match=r"tokenizer\.json.*not there"):
        export_folder(state, LLAMA, tmp_path / "other", tokenizer=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_a_state_that_is_not_the_models_is_refused_by_name(tmp_path):
    state = state_of(random_decoder(LLAMA, torch.float32))
    state["nonsense"] = state.pop("norm.weight")
    with pytest.raises(SpecError, match=r"nonsense: is no weight[\s\S]*norm\.weight: is missing"):
        export_folder(state, LLAMA, tmp_path / "hf")


def test_the_tokenizer_goes_along_and_transformers_encodes_with_it(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=["<|endoftext|>"])
    tokenizer.train_from_iterator(["a plain text about a plain model"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    state = state_of(random_decoder(LLAMA, torch.float32))
    folder = export_folder(state, LLAMA, tmp_path / "hf", tokenizer=tmp_path / "tokenizer.json")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs("a plain model")["input_ids"] == tokenizer.encode("a plain model").ids
    assert theirs.eos_token == "<|endoftext|>"
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 0
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 0
    assert import_folder(folder)[0].vocab_size == 97
