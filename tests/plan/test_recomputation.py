from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.layout import Layout
from ultrascale.plan.layouts import LayoutTable
from ultrascale.plan.time.blocks import price_blocks
from ultrascale.plan.time.price import predict
from ultrascale.plan.view.recomputation import recomputation_statement, recompute_tradeoffs
from ultrascale.plan.workload import Workload
from ultrascale.work.recompute import recompute_of_mode, saved_bytes_by_kind
from ultrascale.work.work import Shape, block_work


def test_selective_recomputation_of_experts_saves_less_than_full_and_costs_less():
    mixtral = Workload(PRESETS["mixtral-8x7b"], parse_cluster("64xh100"), 4096, 256)
    selective, full = recompute_tradeoffs(mixtral, Layout(dp=64, ep=8, zero_stage=2, precision="bf16"))
    assert 0 < selective.saved_bytes < full.saved_bytes
    assert 0 < selective.added_seconds < full.added_seconds < 0.4 * full.step_seconds


def test_recomputing_the_core_of_fused_attention_saves_nothing_today():
    dense = Workload(PRESETS["llama-3-8b"], parse_cluster("64xh100"), 8192, 256, STACKS["megatron"])
    layout = Layout(dp=16, tp=4, zero_stage=1, precision="bf16")
    selective, _ = recompute_tradeoffs(dense, layout)
    assert selective.saved_bytes < 0.01 * 80e9
    assert "attention's core again) saves next to nothing" in recomputation_statement(dense, layout)


def test_torchtitans_policy_keeps_no_grouped_product_of_experts():
    """Its list names aten.mm, attention and what came over the network; grouped products are another operator."""
    model, stack = PRESETS["mixtral-8x7b"], STACKS["torchtitan"]
    shape = Shape(1, 4096, "bf16", ep=8, kernels=stack.kernels)
    token = 4096 * 2  # bytes of one element of every token
    ops, hidden = block_work(model, 0, shape), token * model.hidden_size
    recomputed = [recompute_of_mode(way, model, 0, shape, stack) for way in ("selective", "full")]
    kept, whole = (saved_bytes_by_kind(ops, recomputation, hidden, stack.selective) for recomputation in recomputed)
    # Its input; every second of q, k, v, o and the router; attention's result; two exchanges of two experts' tokens each.
    exchanged = 2 * 2 * model.hidden_size
    products = model.query_size + model.key_value_size + 2 * model.num_experts  # the router's are fp32
    assert whole == {"residual": hidden}
    assert kept["matmul"] == token * products
    assert kept["exchange"] == token * exchanged


def test_torchtitans_policy_computes_all_experts_again_and_half_of_the_rest():
    workload = Workload(PRESETS["mixtral-8x7b"], parse_cluster("64xh100"), 4096, 256, STACKS["torchtitan"])
    blocks = price_blocks(workload, LayoutTable.of([Layout(dp=64, ep=8, zero_stage=3, precision="bf16")])).part(0)
    experts, others = float(blocks.grouped_product[0]), float((blocks.product - blocks.grouped_product)[0])
    assert experts > 3 * others
    again, plain = (
        predict(workload, Layout(dp=64, ep=8, zero_stage=3, precision="bf16", recompute=way)).waterfall["recompute"]
        for way in ("selective", "none")
    )
    layers, rounds = 32, 4
    least = layers * rounds * (experts + others / 2)
    assert plain == 0 and least < again < 1.6 * least  # and what is element-wise
