"""One contestant of `step_speed.py`, in a process of its own: python step_contestants.py CASE.json

It imports what it needs, prints `"imported"` and waits for `go` on its input, so that the next contestant can import while one
is on the device. Then it builds the model, warms up (and compiles), prints `"warm"`, times steps one by one and prints a row:
each message is a line of JSON. Every contestant trains the same shape on random tokens in bf16 with fp32 master weights (unless
its name says otherwise), fused AdamW, gradients clipped at 1, and reads its loss after every step.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ultrascale.catalogue.models.model_presets import preset
from ultrascale.description.architecture.model import Model

WARM_UP = 3
VERSION = {"transformers": "transformers", "liger": "liger_kernel", "plain": "torch", "ours": "ultrascale"}
"""The package of each kind of contestant."""
Step = Callable[[], float]
"""Trains one step and returns its loss, which it has waited for."""


@dataclass(frozen=True)
class Case:
    """What one process does. A step is `micro_batch_size` x `accumulate` sequences."""

    contestant: str
    """`ours`, `plain`, `transformers` or `liger`, with words behind a comma that change it."""
    model: str
    num_layers: int | None
    sequence_length: int
    micro_batch_size: int
    accumulate: int
    steps: int
    toy: bool
    device: str

    @property
    def kind(self) -> str:
        return self.contestant.partition(",")[0]

    def has(self, word: str) -> bool:
        """Whether the contestant's name says this."""
        return word in self.contestant.partition(",")[2]


def shape_of(case: Case) -> Model:
    """The model's shape, cut in depth as the case says; tiny where it is a toy."""
    model = preset(case.model)
    if case.toy:
        small: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
        model = replace(model, **small, num_key_value_heads=2, num_hidden_layers=2, vocab_size=512, no_rope_layer_interval=None)
    return model if case.num_layers is None else replace(model, num_hidden_layers=case.num_layers)


def tokens_of(case: Case, model: Model, device: torch.device) -> torch.Tensor:
    """Random tokens [accumulate, B, S + 1], int64."""
    shape = (case.accumulate, case.micro_batch_size, case.sequence_length + 1)
    return torch.from_numpy(np.random.default_rng(0).integers(0, model.vocab_size, shape)).to(device)


def ours(case: Case, model: Model) -> tuple[Step, dict[str, Any]]:
    """The trainer's own step; what was planned for it."""
    from ultrascale.data.loader import Sequences
    from ultrascale.description.layout import Layout
    from ultrascale.description.run import Batch, Data, Log, Run
    from ultrascale.parallel.mesh import Ranks
    from ultrascale.train.folder.run_folder import RunFolder
    from ultrascale.train.start.chosen_kernels import choose_kernels
    from ultrascale.train.trainer import Trainer

    class RandomTokens:
        def read(self, numbers: Iterable[int]) -> Sequences:
            numbers = list(numbers)
            count, length = len(numbers), case.sequence_length
            stream = np.random.default_rng(numbers[0]).integers(0, model.vocab_size, (count, length + 1))
            index = np.broadcast_to(np.arange(length), (count, length))
            ids = (index // 512).copy()  # documents of 512 tokens, read only with a mask
            return Sequences(stream[:, :-1].copy(), stream[:, 1:].copy(), (index % 512).copy(), ids, np.array(numbers))

        def fingerprint(self) -> str:
            return "random tokens"

    layout = Layout(
        micro_batch_size=case.micro_batch_size,
        precision="fp8" if case.has("fp8") else "bf16",
        recompute="full" if case.has("full") else "selective" if case.has("selective") else "none",
    )
    run = Run(
        model, steps=10**6, device="cuda" if case.device == "cuda" else "cpu", compile=compiles(case), layout=layout,
        batch=Batch(case.sequence_length, case.micro_batch_size * case.accumulate),
        data=Data(document_mask=case.has("documents")), log=Log(memory_steps=0),
    )  # fmt: skip
    device = torch.device("cuda", 0) if case.device == "cuda" else torch.device("cpu")
    ranks = Ranks(0, 1, device)
    with tempfile.TemporaryDirectory() as folder:
        chosen = choose_kernels(run, ranks, RunFolder(Path(folder)))
    print("\n".join(chosen.lines), file=sys.stderr, flush=True)
    run = chosen.run
    trainer = Trainer(run, ranks, RandomTokens(), kernels=chosen.forms, draw_on_device=True)
    return lambda: trainer.train_step().gradients.loss, planned(run, device)


def planned(run: Any, device: torch.device) -> dict[str, Any]:
    """What the planner says of `run` on this device: seconds, bytes and FLOPs."""
    from ultrascale.plan.flops import hardware_flops_per_token
    from ultrascale.plan.memory.replay import rank_shape
    from ultrascale.plan.report import plan_run
    from ultrascale.train.start.fit import cluster_of

    plan = plan_run(run, cluster_of(run, device))
    shape = rank_shape(run.layout, run.batch.sequence_length, documents=run.data.document_mask, device="cuda")
    found: dict[str, Any] = {
        "planned_peak_bytes": plan.peak_bytes,
        "hardware_flops_per_token": hardware_flops_per_token(run.model, run.layout, shape),
    }
    if plan.prediction is not None:
        found |= {
            "planned_step_seconds": plan.prediction.step_seconds,
            "planned_reserved_bytes": float(plan.prediction.memory.reserved),
        }
    return found


def plain(case: Case, model: Model) -> tuple[Step, dict[str, Any]]:
    """A hand-written decoder and loop, compiled as a whole; `graphs`: replayed as CUDA graphs, which launches nothing."""
    from plain_decoder import PlainDecoder

    device = torch.device(case.device)
    with device:
        decoder = PlainDecoder(model)
    mode = "reduce-overhead" if case.has("graphs") else None
    forward = torch.compile(decoder, mode=mode) if compiles(case) else decoder

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return forward(tokens[:, :-1], tokens[:, 1:])

    return loop(case, model, decoder, loss_of), {}


def transformers(case: Case, model: Model) -> tuple[Step, dict[str, Any]]:
    """Hugging Face's model with SDPA, compiled as a whole or (`layers compiled`) layer by layer."""
    hf = hugging_face_model(case, model)
    return hugging_face_loop(case, model, hf), {}


def liger(case: Case, model: Model) -> tuple[Step, dict[str, Any]]:
    """The same with Liger's kernels: norm, rotary, SwiGLU, and the head fused with the loss. Eager, as Liger recommends."""
    from liger_kernel.transformers.monkey_patch import (  # pyright: ignore[reportMissingImports]
        _apply_liger_kernel_to_instance as apply_liger,
    )

    hf = hugging_face_model(case, model)
    apply_liger(model=hf)
    return hugging_face_loop(case, model, hf), {}


def hugging_face_model(case: Case, model: Model) -> Any:
    """The model with weights of its own drawing, on the device; `bf16 weights`: without fp32 masters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from ultrascale.description.architecture.huggingface import to_hf

    facts = to_hf(model)
    left_out = ("architectures", "torch_dtype", "dtype")
    config = AutoConfig.for_model(**{key: value for key, value in facts.items() if key not in left_out})
    config.use_cache = False
    dtype = torch.bfloat16 if case.has("bf16 weights") else torch.float32
    with torch.device(case.device):
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype).train()


def hugging_face_loop(case: Case, model: Model, hf: Any) -> Step:
    forward = hf
    if case.kind == "transformers" and compiles(case):
        if case.has("layers compiled"):
            for layer in hf.model.layers:
                layer.compile()
        else:
            forward = torch.compile(hf)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        # The model shifts labels itself; the last token is read and never seen, as in the others.
        return forward(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss

    return loop(case, model, hf, loss_of)


def loop(case: Case, model: Model, module: torch.nn.Module, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> Step:
    """A training step as a good PyTorch person writes it: autocast, fused AdamW, clipping at 1."""
    device = torch.device(case.device)
    groups = [
        {"params": [p for p in module.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    tokens = tokens_of(case, model, device)
    autocasts = not case.has("bf16 weights")

    def step() -> float:
        total = torch.zeros((), device=device)
        for part in tokens:
            with torch.autocast(device.type, torch.bfloat16, enabled=autocasts):
                loss = loss_of(part) / case.accumulate
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total.item()

    return step


def compiles(case: Case) -> bool:
    return not case.toy and not case.has("eager")


def measure(case: Case, say: Callable[[Any], None]) -> dict[str, Any]:
    """Warm up and time steps. Seconds of each, peaks in bytes, the last loss."""
    model, on_cuda = shape_of(case), case.device == "cuda"
    torch.manual_seed(0)
    started = time.perf_counter()
    step, facts = CONTESTANTS[case.kind](case, model)
    for _ in range(WARM_UP):
        step()
    settle(on_cuda)
    warm = time.perf_counter() - started
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()  # of steps, not of what chose or compiled kernels for them
    say("warm")
    seconds, loss = [], 0.0
    for _ in range(case.steps):
        start = time.perf_counter()
        loss = step()
        settle(on_cuda)
        seconds.append(time.perf_counter() - start)
    peaks = {"peak_allocated_bytes": None, "peak_reserved_bytes": None}
    if on_cuda:
        peaks = {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        }
    version = getattr(importlib.import_module(VERSION[case.kind]), "__version__", "")
    return {"seconds": seconds, "until_warm_seconds": warm, "loss": loss, "version": version} | peaks | facts


def settle(on_cuda: bool) -> None:
    if on_cuda:
        torch.cuda.synchronize()


def prepare(case: Case) -> None:
    """Import what takes seconds, nothing that touches the device."""
    wanted = {"ours": ["ultrascale.train.trainer"], "plain": ["plain_decoder"]}.get(case.kind, ["transformers"])
    for name in (*wanted, "torch._dynamo", *(["liger_kernel.transformers"] if case.kind == "liger" else [])):
        importlib.import_module(name)


CONTESTANTS: dict[str, Callable[[Case, Model], tuple[Step, dict[str, Any]]]] = {
    "ours": ours, "plain": plain, "transformers": transformers, "liger": liger,
}  # fmt: skip


def main() -> int:
    """Play the protocol; an error is a last line {"failed": ...}."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not reach the protocol

    def say(message: Any) -> None:
        print(json.dumps(message), file=out)

    case = Case(**json.loads(Path(sys.argv[1]).read_text()))
    try:
        prepare(case)
        say("imported")
        if sys.stdin.readline().strip() != "go":
            return 0
        say(measure(case, say))
        return 0
    except Exception as error:
        words = [line for line in str(error).splitlines() if line.strip()] or [""]
        is_full = isinstance(error, torch.OutOfMemoryError)
        say({"failed": f"{type(error).__name__}: {words[0][:200]}", "out_of_memory": is_full})
        return 1


if __name__ == "__main__":
    sys.exit(main())
