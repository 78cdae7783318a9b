"""A reference that shares only the initial weights with the trainer: a plain training loop around transformers' model.

    model            read by transformers from our export, in float64; parameters that it always makes fp32 are widened
    documents        one at a time, so that nothing is packed or masked; summed losses over the global number of targets
    optimizer        torch's AdamW; weight decay for matrices that are not biases; learning rates written out as a table
    after each step  loss, gradient norm, and the weights, read back from what transformers saves

Features that transformers lacks are removed from the run (`comparable`). Nothing else in the package imports transformers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.overrides import TorchFunctionMode

from ultrascale.check.oracle.reference import StepFacts
from ultrascale.description.problems import mistake
from ultrascale.description.progress import step_span
from ultrascale.description.run import Optimizer, Run
from ultrascale.models.decoder import Decoder
from ultrascale.models.files.huggingface import export_folder, import_folder
from ultrascale.models.initialise import initialise
from ultrascale.train.micro_batches import ReadsSequences

TOLERANCE, TOLERANCE_DEEPSEEK_V2 = 1e-10, 1e-7
"""Transformers' DeepSeek-V2 rotates by complex numbers in fp32, of which each part is rounded otherwise than a cosine."""
WITHOUT: dict[str, Any] = {
    "dropout": 0.0, "num_nextn_predict_layers": 0, "expert_capacity_factor": None, "router_aux_loss_coef": 0.0,
    "router_z_loss_coef": 0.0, "router_bias_update_rate": 0.0,
}  # fmt: skip
"""Fields of a model that transformers does not have, or gives another meaning, and the values at which they do nothing."""


def comparable(run: Run, steps: int) -> tuple[Run, list[str]]:
    """`run` without the features that transformers lacks, and with the number of steps compared, so that these include the
    warm-up, if there is one, and the decay of the learning rate; and a description of the changes.

    Raises SpecError if transformers lacks the family.
    """
    _expect_family(run.model.model_type)
    off = {key: value for key, value in WITHOUT.items() if getattr(run.model, key) != value}
    if run.model.topk_method != "noaux_tc":
        off.pop("router_bias_update_rate", None)  # there are no biases to move
    notes = [f"Compared without {', '.join(f'model.{key}' for key in off)}: transformers has no such thing."] if off else []
    original = run.optimizer
    if original.name != "adamw":
        notes.append(f"Compared with AdamW: a plain loop has no {original.name}.")
    decay = None if original.decay_steps is None else min(original.decay_steps, max(1, steps // 2))
    optimizer = replace(original, name="adamw", warmup_steps=min(original.warmup_steps, steps // 3), decay_steps=decay)
    return replace(run, model=replace(run.model, **off), optimizer=optimizer, steps=steps), notes


def tolerance_of(run: Run) -> float:
    """Largest relative difference allowed between a run and transformers."""
    return TOLERANCE_DEEPSEEK_V2 if run.model.model_type == "deepseek_v2" else TOLERANCE


def learning_rates(optimizer: Optimizer, steps: int) -> list[float]:
    """Learning rate of each step: linear warm-up to the peak, then the schedule; a decay ends at the floor in the last step."""
    peak, warm = optimizer.learning_rate, optimizer.warmup_steps
    floor, after_warmup = peak * optimizer.min_learning_rate_ratio, max(1, steps - optimizer.warmup_steps)
    rates = [peak * number / warm for number in range(1, warm + 1)]
    if optimizer.schedule == "constant":
        rates += [peak] * after_warmup
    elif optimizer.schedule == "cosine":
        rates += [floor + (peak - floor) * 0.5 * (1 + cos(pi * number / after_warmup)) for number in range(1, after_warmup + 1)]
    else:
        last = max(1, steps // 10) if optimizer.decay_steps is None else optimizer.decay_steps
        falling = after_warmup if optimizer.schedule == "linear" else min(after_warmup, last)
        rates += [peak] * (after_warmup - falling) + [peak - (peak - floor) * n / falling for n in range(1, falling + 1)]
    return rates


@dataclass
class TransformersLoop:
    """A run in transformers, in one process."""

    run: Run
    loader: ReadsSequences
    steps_done: int = 0
    model: Any = field(init=False)
    optimizer: torch.optim.AdamW = field(init=False)

    def __post_init__(self) -> None:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        decoder = Decoder(self.run.model).double()
        initialise(decoder, self.run.model, self.run.seed)
        with tempfile.TemporaryDirectory(prefix="ultrascale-against-") as folder:
            exported = export_folder(decoder.state_dict(), self.run.model, Path(folder) / "hf")
            options = {"dtype": torch.float64, "attn_implementation": "eager", "experts_implementation": "eager"}
            self.model = transformers.AutoModelForCausalLM.from_pretrained(exported, **options).eval()
            _widen_parameters(self.model, Path(exported))
        settings, named = self.run.optimizer, dict(self.model.named_parameters())
        decayed = {n for n, p in named.items() if p.ndim >= 2 and not n.endswith("bias")}  # experts' biases lie in one matrix
        groups = [
            {
                "params": [p for n, p in named.items() if (n in decayed) == decays],
                "weight_decay": settings.weight_decay * decays,
            }
            for decays in (True, False)
        ]
        betas = (settings.beta1, settings.beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, eps=settings.eps)

    def train_step(self, clip_share: float | None = None) -> StepFacts:
        """Run the next step. `clip_share`: clip at this share of the gradient's norm."""
        batch = self.loader.read(step_span(self.run.batch, self.steps_done).numbers)
        count = max(1, int((batch.targets >= 0).sum()))
        loss_sum = 0.0
        self.optimizer.zero_grad()
        with _Widened():
            for tokens, targets in self._documents(*map(torch.from_numpy, (batch.tokens, batch.targets, batch.document_ids))):
                logits = self.model(input_ids=tokens[None], use_cache=False).logits[0]
                loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / count
                loss.backward()
                loss_sum += float(loss.detach())
        norm = get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        if clip_share is not None:
            clip_grads_with_norm_(self.model.parameters(), clip_share * float(norm), norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rates(self.run.optimizer, self.run.steps)[self.steps_done]
        self.optimizer.step()
        self.steps_done += 1
        return StepFacts(loss_sum, float(norm), {}, self._weights(), {})

    def _documents(self, tokens: Tensor, targets: Tensor, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens and targets of each document that predicts anything."""
        for row in range(len(tokens)):
            for document in ids[row].unique():
                in_document = ids[row] == document
                if (targets[row, in_document] >= 0).any():
                    yield tokens[row, in_document], targets[row, in_document]

    def _weights(self) -> dict[str, Tensor]:
        """By our names."""
        with tempfile.TemporaryDirectory(prefix="ultrascale-against-") as folder:
            self.model.save_pretrained(folder)
            _, state = import_folder(folder)
        return {name: value for name, value in state.items() if not name.endswith("e_score_correction_bias")}


def _expect_family(family: str) -> None:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known

    if family not in known:
        rule = f"transformers {transformers.__version__} has no family {family}"
        raise mistake("--against", rule, "Install a newer one, or leave --against out.")


@torch.no_grad()
def _widen_parameters(model: torch.nn.Module, folder: Path) -> None:
    """Read again in float64 the parameters that transformers always makes fp32: routers, since 5.24."""
    narrow = {name: parameter for name, parameter in model.named_parameters() if parameter.dtype != torch.float64}
    for file in folder.glob("*.safetensors") if narrow else ():
        with safe_open(file, "pt") as stored:
            for name in narrow.keys() & set(stored.keys()):
                narrow[name].data = stored.get_tensor(name)


class _Widened(TorchFunctionMode):
    """Keeps float64 wherever a model asks for fp32 by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(_wide(argument) for argument in args)
            kwargs = {key: _wide(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _wide(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument
