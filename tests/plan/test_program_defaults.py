"""Blank cells of measured runs that a program's own defaults, or its source's text, fill."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan.test_validate import config

from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.plan.columns.footprint import stage_memory
from ultrascale.plan.layouts import LayoutTable
from ultrascale.validation.cells.programs import program_of_row
from ultrascale.validation.predict import predict_rows
from ultrascale.validation.setups import setup_of
from ultrascale.work.ops import Shape
from ultrascale.work.work import block_work

PIPELINE = {"pp": "8", "tp": "8", "dp": "8", "n_gpus": "512", "layers": "126", "micro_batch": "", "grad_accum": "", "vpp": ""}
README = "NVIDIA Megatron-LM README, images/model_table.png"


@pytest.mark.parametrize(("stack", "size"), [("torchtitan-2024", 4), ("torchtitan", 1), ("", 1)])
def test_torchtitan_cuts_a_batch_in_as_many_micro_batches_as_stages_and_later_in_single_sequences(stack: str, size: int):
    setup = setup_of(config(**PIPELINE, global_batch="256", pp_schedule="1f1b", stack=stack))
    assert [layout.micro_batch_size for layout in setup.layouts] == [size] and "micro_batch" not in setup.open_cells
    assert f"micro_batch = {size}, its program's default in a pipeline" in setup.assumed


def test_a_batch_that_torchtitan_could_not_cut_so_stays_open():
    setup = setup_of(config(**PIPELINE, global_batch="96", pp_schedule="1f1b", stack="torchtitan-2024"))  # 12 sequences in 8
    assert "micro_batch" in setup.open_cells


def test_torchtitan_s_interleaved_pipelines_have_two_stages_a_rank():
    setup = setup_of(config(**PIPELINE, global_batch="256", pp_schedule="interleaved_1f1b"))
    assert {(layout.schedule, layout.virtual_stages) for layout in setup.layouts} == {("interleaved", 2)}


def test_embedding_and_head_may_count_as_layers_where_megatron_cuts_chunks():
    cells = PIPELINE | {"framework": "Megatron-LM", "micro_batch": "1", "zero_stage": "1"}
    setup = setup_of(config(**cells, global_batch="256"))
    assert sorted({layout.virtual_stages for layout in setup.layouts}) == [1, 2, 4, 8, 16]  # of 128


@pytest.mark.parametrize(
    ("schedule", "vpp", "chunks"),
    [
        ("1f1b", "", {1, 2, 3, 4, 6, 12}), ("1f1b (interleaving not stated)", "", {1, 2, 3, 4, 6, 12}),
        ("interleaved_1f1b", "", {2, 3, 4, 6, 12}), ("1f1b", "1", {1}), ("", "3", {3}), ("zb-h1", "", {1}),
    ],
)  # fmt: skip
def test_a_schedule_that_is_not_stated_is_open(schedule: str, vpp: str, chunks: set[int]):
    cells = PIPELINE | {"vpp": vpp, "framework": "Megatron-LM", "micro_batch": "1", "zero_stage": "1", "layers": "96"}
    setup = setup_of(config(**cells, global_batch="256", pp_schedule=schedule))
    assert {layout.virtual_stages for layout in setup.layouts} == chunks


@pytest.mark.parametrize("key", ["megascale", "somewhere"])
def test_megascale_s_baseline_has_nothing_beside_its_passes(key: str):
    setup = setup_of(config(framework="Megatron-LM (commit 285068c8)", source_key=key))
    assert setup.workload.stack.overlaps_data_parallel is (key != "megascale")


@pytest.mark.parametrize(("framework", "num_bytes"), [("fms-fsdp (PyTorch FSDP1)", 2), ("PyTorch FSDP", 4)])
def test_fms_fsdp_reduces_in_bf16(framework: str, num_bytes: int):
    assert program_of_row(config(framework=framework)).stacks[0].reduce_bytes == num_bytes


@pytest.mark.parametrize(
    ("framework", "stage"),
    [("OLMo-core", 3), ("NeMo AutoModel", 3), ("", 3), ("PyTorch FSDP", 3), ("InternEvo", 1), ("vTrain (Megatron)", 0)],
)
def test_a_blank_zero_stage_is_what_programs_of_the_kind_do(framework: str, stage: int):
    assert setup_of(config(framework=framework, zero_stage="")).layouts[0].zero_stage == stage


@pytest.mark.parametrize(
    ("word", "stage", "shard"),
    [
        ("ZeRO-1", 1, None), ("zero_2", 2, None), ("stage 3", 3, None), ("FULL_SHARD", 3, None), ("SHARD_GRAD_OP", 2, None),
        ("3-offload", 3, None), ("distributed optimizer", 1, None), ("DDP", 0, None), ("hsdp", 3, 8), ("HYBRID_SHARD", 3, 8),
        ("ZeRO-2, no offload", 2, None),
    ],
)  # fmt: skip
def test_words_for_zero_are_known_and_told(word: str, stage: int, shard: int | None):
    setup = setup_of(config(zero_stage=word))
    layout = setup.layouts[0]
    assert (layout.zero_stage, layout.dp_shard) == (stage, shard)
    assert any(text.startswith(f"zero_stage {word!r} is") for text in setup.assumed)


@pytest.mark.parametrize(
    ("word", "gpu", "precision"),
    [("float8 rowwise", "H100", "fp8"), ("e4m3", "H100", "fp8"), ("half", "H100", "fp16"), ("float32", "H100", "fp32"),
     ("bf16 (not fp8)", "H100", "bf16"), ("bf16 compute, fp8 all-gather", "H100", "bf16"), ("bf16 without fp8", "H100", "bf16"),
     ("bf16; fp8 optimizer states", "H100", "bf16"), ("bf16/fp8", "H100", "fp8"), ("mixed (bf16 and fp8)", "H100", "fp8"),
     ("mixed", "H100", "bf16"), ("16-bit", "V100", "fp16"), ("", "V100", "fp16")],
)  # fmt: skip
def test_words_of_a_precision_are_known(word: str, gpu: str, precision: str):
    assert setup_of(config(precision=word, gpu=gpu)).layouts[0].precision == precision


@pytest.mark.parametrize(
    ("cells", "activations", "state"),
    [
        ({"offload": "parameters to the CPU"}, False, True), ({"offload": "ZeRO-Offload"}, False, True),
        ({"offload": "optimizer"}, False, True), ({"zero_stage": "3-offload"}, False, True),
        ({"offload": "activations of 40 layers to CPU"}, True, False), ({"offload": ""}, False, False),
        ({"zero_stage": "3, no offload"}, False, False), ({"zero_stage": "ZeRO-3 without offload"}, False, False),
        ({"offload": "activations, not the optimizer"}, True, False),
    ],
)  # fmt: skip
def test_words_for_what_the_host_keeps_are_known(cells: dict[str, str], activations: bool, state: bool):
    layout = setup_of(config(**cells)).layouts[0]
    assert (layout.offload_activations, layout.offload_optimizer) == (activations, state)


@pytest.mark.parametrize("word", ["bf16+fp8", "BF16 + FP8 (hybrid)", "float8 with bf16 attention", "fp32 sums, fp8 products"])
def test_of_several_precisions_a_narrow_one_is_that_of_the_products(word: str):
    assert setup_of(config(precision=word)).layouts[0].precision == "fp8"


def test_a_setting_that_a_program_states_is_not_open_though_it_is_in_the_program_it_extends():
    eager = program_of_row(config(framework="", stack="eager"))
    assert eager.open_settings == () and eager.stacks[0].kernels.cross_entropy == "eager"
    assert program_of_row(config(framework="Megatron-LM")).open_settings == ("kernels.cross_entropy",)


def test_how_tokens_travel_is_open_in_megatron_and_not_in_programs_that_have_one_way():
    cells = {"kv_heads": "32", "experts": "64", "topk": "6", "expert_ffn": "1408"}
    programs = {name: program_of_row(config(**cells, framework="", stack=name)) for name in ("megatron", "eager", "hai-llm")}
    assert {stack.dispatcher for stack in programs["megatron"].stacks} == {"alltoall", "deepep"}
    assert {stack.dispatcher for stack in programs["eager"].stacks} == {"alltoall"}
    assert {stack.dispatcher for stack in programs["hai-llm"].stacks} == {"deepep"}


@pytest.mark.parametrize(
    ("framework", "stack"),
    [("FlagScale", "megatron"), ("Primus", "megatron"), ("Primus (torchtitan)", "torchtitan"), ("HF Trainer", "transformers"),
     ("Hugging Face Trainer with FSDP", "transformers"), ("nanotron (Hugging Face)", "nanotron")],
)  # fmt: skip
def test_programs_built_on_another_are_priced_as_it(framework: str, stack: str):
    assert program_of_row(config(framework=framework)).stacks[0].name == stack


def test_a_batch_of_no_whole_micro_batches_is_rounded_and_told():
    setup = setup_of(config(dp="12", n_gpus="12", micro_batch="4", global_batch="1538", grad_accum="32"))
    assert setup.workload.sequences_per_batch == 1536
    assert "global_batch = 1536, of whole micro-batches: 1538 is none" in setup.assumed


@pytest.mark.parametrize(("hidden", "tp", "heads"), [(4096, 1, 32), (11600, 4, 100), (11600, 1, 100), (14336, 8, 112)])
def test_blank_heads_divide_the_width_and_are_cut_by_tp(hidden: int, tp: int, heads: int):
    cells = {
        "hidden": str(hidden),
        "tp": str(tp),
        "dp": "",
        "heads": "",
        "kv_heads": "",
        "model": "GPT",
        "framework": "Megatron-LM",
    }
    assert setup_of(config(**cells)).workload.model.num_attention_heads == heads


def test_devices_from_before_bf16_are_predicted_over_their_fp16_peak():
    one = predict_rows([config(gpu="V100-32GB", precision="fp16", zero_stage="3", seq_len="1024")])[0]
    assert one.step_seconds and one.mfu and one.flops_per_second_per_gpu
    assert one.flops_per_second_per_gpu / one.mfu == pytest.approx(125e12, rel=0.01)


def test_automodel_s_recomputation_is_open_where_nemo_s_recipes_have_none():
    found = [setup_of(config(framework=framework, recompute="")).open_cells for framework in ("NeMo AutoModel", "NeMo 25.02")]
    assert "recompute" in found[0] and "recompute" not in found[1]


def test_automodel_attends_with_transformer_engine_and_sends_tokens_once():
    stacks = [
        program_of_row(config(framework=framework, experts="128", topk="8", expert_ffn="768")).stacks[0]
        for framework in ("NeMo AutoModel", "torchtitan")
    ]
    assert [(stack.name, stack.attention_kernel, stack.dispatcher) for stack in stacks] == [
        ("automodel", "cudnn", "deepep"), ("torchtitan", "flash-2", "alltoall"),
    ]  # fmt: skip


@pytest.mark.parametrize(("framework", "pp", "stage"), [("torchtitan", "8", 1), ("torchtitan", "1", 3), ("MaxText", "8", 3)])
def test_torchtitan_s_pipelines_gather_parameters_and_reduce_gradients_once_a_step(framework: str, pp: str, stage: int):
    """Its `fsdp_reshard_after_forward = "default"` reshards only without pp, and torch's stages reduce at the last backward."""
    cells = PIPELINE | {"pp": pp, "n_gpus": str(64 * int(pp)), "framework": framework, "zero_stage": "3"}
    assert {layout.zero_stage for layout in setup_of(config(**cells, global_batch="256", pp_schedule="1f1b")).layouts} == {
        stage
    }


def test_logits_of_all_micro_batches_stay_on_torchtitan_s_last_stage_where_its_caller_gets_them():
    cells = PIPELINE | {"layers": "16", "hidden": "4096", "pp": "2", "tp": "1", "n_gpus": "16", "framework": "torchtitan"}
    cells |= {"heads": "32", "kv_heads": "8", "ffn_hidden": "14336", "vocab": "128256", "seq_len": "8192", "recompute": "full"}
    at_end = {}
    for stack in ("torchtitan-2024", "torchtitan"):
        setup = setup_of(config(**cells, global_batch="64", pp_schedule="1f1b", stack=stack))
        layout = replace(setup.layouts[0], micro_batch_size=1)  # of 8
        workload = replace(setup.workload, stack=replace(setup.workload.stack, kernels=STACKS["torchtitan"].kernels))
        at_end[stack] = stage_memory(workload, LayoutTable.of([layout])).by_rank[-1, 0]
    assert at_end["torchtitan-2024"] - at_end["torchtitan"] == (8 - 1) * 8192 * 128_256 * 2


@pytest.mark.parametrize(
    ("framework", "precision", "scalings"),
    [("MaxText (JAX/XLA)", "fp8", ["delayed"]), ("PaxML (JAX/XLA)", "fp8", ["delayed"]), ("NeMo 25.02", "fp8", ["delayed"]),
     ("torchtitan", "fp8", ["tensor", "row"]), ("torchtitan", "mxfp8", ["tensor"]), ("torchtitan", "float8 rowwise", ["row"]),
     ("torchtitan", "fp8-tensorwise", ["tensor"]), ("NeMo 25.02", "FP8 current scaling", ["tensor"])],
)  # fmt: skip
def test_scales_of_fp8_are_a_program_s_own_unless_the_precision_names_them(framework: str, precision: str, scalings: list[str]):
    """flax.linen.fp8_ops keeps a history of largest magnitudes; torchao reads each tensor once more, or scales rows."""
    stacks = program_of_row(config(framework=framework, precision=precision)).stacks
    assert list(dict.fromkeys(stack.kernels.fp8_scaling for stack in stacks)) == scalings


def test_torchtitan_of_2024_repeats_keys_and_sends_all_of_them_over_cp():
    """repeat_kv before attention, until its pull request 2259; so has its issue 1283 (2025)."""
    cells = {"n_gpus": "8", "dp": "2", "cp": "4", "tp": "1", "heads": "32", "kv_heads": "8", "seq_len": "131072"}
    sent = {}
    for stack in ("torchtitan-2024", "torchtitan"):
        setup = setup_of(config(**cells, stack=stack))
        shape = Shape(1, 131_072, "bf16", device="cuda", cp=4, cp_method="all-gather", kernels=setup.workload.stack.kernels)
        ops = block_work(setup.workload.model, 0, shape)
        sent[stack] = [one.num_bytes for op in ops for one in op.collectives if one.axis == "cp"]
        assert ("self_attn.k_rotated_repeat" in {op.name for op in ops}) is (stack == "torchtitan-2024")
    assert sent["torchtitan-2024"] == [4 * num_bytes for num_bytes in sent["torchtitan"]] != []


def test_a_model_known_by_name_has_its_norms_biases_and_windows_beside_stated_dimensions():
    gemma = {"model": "Gemma-3-12B", "layers": "48", "hidden": "3840", "heads": "16", "kv_heads": "8", "ffn_hidden": "15360"}
    named = setup_of(config(**gemma, head_dim="256", vocab="262208")).workload.model
    assert (named.norm_placement, named.window(0), named.window(5)) == ("both", 1024, None)
    olmo = {"model": "OLMo-2-7B", "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "32", "ffn_hidden": "11008"}
    assert setup_of(config(**olmo)).workload.model.qk_norm_whole
    assert not setup_of(config(**olmo | {"gated_mlp": "0"})).workload.model.qk_norm  # another model of that name
    assert setup_of(config(**olmo | {"model": "Qwen2.5-7B"})).workload.model.qkv_bias is False  # of another width


def test_gpt_oss_has_its_biases_and_sinks_in_rows_too():
    cells = {"model": "GPT-OSS-120B", "experts": "128", "topk": "4", "expert_ffn": "2880", "hidden": "2880", "heads": "64"}
    cells |= {"kv_heads": "8", "head_dim": "64", "layers": "36", "vocab": "201088", "attn_kind": "gqa-swa"}
    cells |= {"n_gpus": "64", "dp": "64", "tp": "1", "pp": "1", "global_batch": "64", "framework": "Megatron-Bridge"}
    model = setup_of(config(**cells)).workload.model
    assert model.attention_sinks and model.mlp_bias and model.qkv_bias and model.hidden_act == "swigluoai"
    other = setup_of(config(**{**cells, "model": "Qwen3-30B"})).workload.model
    assert not other.attention_sinks and not other.mlp_bias


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("", ("eager", False, "flash-2", False)),
        (" with Liger Kernel", ("by-rows", True, "flash-2", False)),
        (", FA3", ("eager", False, "flash", True)), (" + FlashAttention-4", ("eager", False, "flash", True)),
        (", flash attention 2", ("eager", False, "flash-2", False)), (", cuDNN attention", ("eager", False, "cudnn", False)),
        (", liger_kernel", ("by-rows", True, "flash-2", False)), (", FlashAttention v3", ("eager", False, "flash", True)),
        *((words, ("eager", False, "flash-2", False)) for words in (
            ", torch 2.8, CUDA 12.9, cuDNN 9.10", " without Liger", ", no cuDNN attention", ", FA3 off",
            ", flash-attn 4D parallel", ", FlashAttention2 3D",
        )),
    ],
)  # fmt: skip
def test_kernels_named_beside_a_program_replace_its_own(words: str, settings: tuple[str, bool, str, bool]):
    stack = program_of_row(config(framework=f"TRL SFTTrainer{words}")).stacks[0]
    kernels = stack.kernels
    assert (kernels.cross_entropy, kernels.swiglu, stack.attention_kernel, kernels.masks_in_kernel) == settings
    assert kernels.norm == kernels.rotary == kernels.swiglu


@pytest.mark.parametrize(("cells", "kernel"), [({}, ("flash", True)), ({"flash_attention": "0"}, ("math", False))])
def test_a_named_flash_kernel_is_taken_unless_the_row_has_none(cells: dict[str, str], kernel: tuple[str, bool]):
    kernels = program_of_row(config(framework="Megatron-DeepSpeed, FA3", **cells)).stacks[0].kernels
    assert (kernels.attention, kernels.masks_in_kernel) == kernel


def test_torchtitan_skips_what_a_window_hides_and_sdpa_of_2024_does_not():
    cells = {"model": "GPT-OSS-20B", "layers": "24", "hidden": "2880", "heads": "64", "kv_heads": "8", "head_dim": "64"}
    cells |= {"experts": "32", "topk": "4", "expert_ffn": "2880", "attn_kind": "gqa_swa", "seq_len": "8192", "ffn_hidden": ""}
    skipped, masked = predict_rows([config(**cells, stack=stack) for stack in ("torchtitan", "torchtitan-2024")])
    assert skipped.step_seconds and masked.step_seconds and skipped.step_seconds < 0.9 * masked.step_seconds


def test_eager_bytes_of_a_dispatch_are_counted_once():
    dense, experts = STACKS["torchtitan"].overheads, STACKS["transformers"].overheads
    assert experts.elementwise * experts.expert_elementwise == dense.elementwise * dense.expert_elementwise == 2.5


@pytest.mark.parametrize(
    ("cells", "beside"),
    [
        ({"framework": "Megatron-LM"}, True), ({"framework": "NeMo 25.09"}, True), ({"framework": "my own"}, False),
        ({"stack": "megatron-2022"}, False), ({"source_key": "korthikanti", "framework": "Megatron-LM"}, True),
    ],
)  # fmt: skip
def test_megatron_s_column_parallel_layers_send_beside_their_gemms(cells: dict[str, str], beside: bool):
    setup = setup_of(config(tp="8", dp="8", **cells))
    assert setup.workload.stack.sends_beside_gradients is beside
