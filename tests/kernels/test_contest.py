"""Contests between kernels: the fastest wins, what is wrong is out, and all ranks decide alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ultrascale.description.attention_cores import CANDIDATE_CORES, CoreRequirements, unsupported_reason
from ultrascale.kernels.attention import attention_contest
from ultrascale.kernels.attention.attention_contest import AttentionShape
from ultrascale.kernels.choice import contest
from ultrascale.kernels.choice.contest import Outcomes, decide, measure, weighted_sum

CPU = torch.device("cpu")
SHAPE = AttentionShape(2, 48, 4, 2, 8, 8, torch.float32)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def wrong(x: Tensor) -> Tensor:
    return x * 2.2


def failing(x: Tensor) -> Tensor:
    raise RuntimeError("no kernel image is available\nand more that nobody reads")


def drifting(x: Tensor) -> Tensor:
    return x * (2 + torch.rand(()) * 1e-4)


@pytest.mark.parametrize(
    ("seconds", "winner"),
    [
        ({"a": 2.0, "b": 1.0, "c": 3.0}, "b"),
        ({"a": 1.01, "b": 1.0, "c": 1.0}, "a"),  # as good as the best: who is named first
        ({"a": 1.03, "b": 1.0, "c": 0.999}, "b"),
    ],
)
def test_the_fastest_wins_and_of_those_as_fast_the_one_named_first(kernel_seconds, seconds, winner):
    kernel_seconds(seconds.__getitem__)
    outcomes = measure(dict.fromkeys("abc", doubled), [torch.ones(3)])
    assert outcomes == seconds
    assert decide("it", [outcomes]).chosen == winner


def test_forms_are_timed_for_real_and_take_turns():
    calls: list[str] = []

    def form(name: str, work: int):
        def run(x: Tensor) -> Tensor:
            calls.append(name)
            for _ in range(work):
                x = x @ torch.eye(64)
            return x

        return run

    outcomes = measure({"slow": form("slow", 200), "fast": form("fast", 1)}, [torch.ones(64, 64)])
    assert decide("it", [outcomes]).chosen == "fast"
    turns = "".join(name[0] for name in calls)
    assert turns == "sf" + ("s" * contest.PASSES + "f" * contest.PASSES) * contest.ROUNDS


def test_what_fails_is_wrong_or_was_left_out_never_wins_and_says_why(kernel_seconds):
    kernel_seconds({"right": 5.0}.__getitem__)
    forms = {"right": doubled, "wrong": wrong, "failing": failing, "left": "is for CUDA"}
    verdict = decide("it", [measure(forms, [torch.ones(3)])])
    assert verdict.chosen == "right" and list(verdict.seconds) == ["right"]
    reasons = {"wrong": "its results are 1e-01 off", "failing": "no kernel image is available", "left": "is for CUDA"}
    assert verdict.refused == reasons
    assert verdict.line() == (
        "it: right 5e+03 ms, the only one that can; not wrong: its results are 1e-01 off; "
        "not failing: no kernel image is available; not left: is for CUDA"
    )


def test_a_form_whose_memory_does_not_suffice_is_out_and_one_with_a_nan_too():
    def greedy(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("tried to allocate")

    outcomes = measure({"ours": doubled, "greedy": greedy, "nan": lambda x: x * float("nan")}, [torch.ones(3)])
    assert outcomes["greedy"] == "out of memory" and outcomes["nan"] == "its results are not finite"


def test_forms_with_other_bits_each_time_are_out_where_bits_must_repeat():
    forms = {"steady": doubled, "drifting": drifting}
    inputs = [torch.ones(3)]
    assert measure(forms, inputs, bitwise=True)["drifting"] == "its gradients differ from one pass to the next"
    assert isinstance(measure(forms, inputs)["drifting"], float)


def test_over_ranks_the_slowest_counts_and_what_fails_on_one_is_out_on_all():
    first: Outcomes = {"a": 1.0, "b": 2.0, "c": 0.5}
    second: Outcomes = {"a": 4.0, "b": 2.0, "c": "out of memory"}
    verdicts = [decide("it", [first, second]) for _ in range(2)]
    assert verdicts[0] == verdicts[1]
    assert verdicts[0].chosen == "b" and verdicts[0].seconds == {"a": 4.0, "b": 2.0}
    assert verdicts[0].refused == {"c": "out of memory"}
    with pytest.raises(RuntimeError, match="no kernel runs here: c: out of memory"):
        decide("it", [{"c": "out of memory"}])


def test_layers_of_several_kinds_add_up_and_who_cannot_do_one_is_out():
    assert weighted_sum([(3, {"a": 2.0, "b": 1.0}), (1, {"a": 5.0, "b": "knows no windows"})]) == {
        "a": 11.0,
        "b": "knows no windows",
    }


@pytest.mark.parametrize("documents", [False, True])
def test_attention_s_cores_that_the_cpu_has_are_timed_on_the_run_s_masks(documents):
    wanted = CoreRequirements("cpu", "fp32", (None, 7, None), documents=documents)
    outcomes = attention_contest.contest(SHAPE, wanted, CPU, compiled=False)
    assert list(outcomes) == list(CANDIDATE_CORES)
    assert {name for name, one in outcomes.items() if isinstance(one, float)} == {"sdpa", "varlen"}
    assert outcomes["cudnn"] == "is for CUDA"
    compiled = attention_contest.contest(SHAPE, wanted, CPU, compiled=True)
    assert compiled["varlen"] == "cannot be compiled on the CPU"


def test_inputs_are_of_as_few_sequences_as_memory_allows_and_never_of_none():
    assert SHAPE.inputs(CPU)[0].shape == (2, 48, 4, 8)
    assert [one.shape[0] for one in SHAPE.inputs(CPU, most_bytes=48 * (4 + 2 + 2) * 8 * 4)] == [1, 1, 1]
    assert SHAPE.inputs(CPU, most_bytes=1)[0].shape[0] == 1


def test_which_cores_take_part_on_cuda():
    causal = CoreRequirements("cuda", "bf16", (None,))
    cores = {
        "causal": causal,
        "documents": causal._replace(documents=True),
        "documents in fp32": causal._replace(documents=True, precision="fp32"),
        "sinks": causal._replace(sinks=True),
        "cp": causal._replace(cp=2, documents=True),
    }
    found = {
        name: [core for core in CANDIDATE_CORES if not attention_contest.excluded(core, wanted, compiled=False)]
        for name, wanted in cores.items()
    }
    assert found == {
        "causal": ["sdpa", "cudnn", "flex"],
        "documents": ["varlen", "flex"],
        "documents in fp32": ["sdpa", "flex"],
        "sinks": ["sdpa", "flex"],
        "cp": ["sdpa"],
    }
    assert unsupported_reason("varlen", causal._replace(head_dim=512)).endswith("not of 512")
