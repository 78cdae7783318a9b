"""Dense feed-forward layers, and the seams around GEMMs that tensor parallelism replaces."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ultrascale.description.architecture.model import Model
from ultrascale.kernels.swiglu import clamped_swiglu, geglu, swiglu

_GATED = {"silu": swiglu, "swigluoai": clamped_swiglu, "gelu_pytorch_tanh": geglu}


def column_linear(hidden: Tensor, *projections: nn.Linear) -> tuple[Tensor, ...]:
    """Several projections of one input: [B, S, D] to [B, S, F] each."""
    return tuple(projection(hidden) for projection in projections)


def row_linear(inner: Tensor, projection: nn.Linear) -> Tensor:
    """Projection back to the residual stream: [B, S, F] to [B, S, D]."""
    return projection(inner)


def activate(activation: str, *inner: Tensor) -> Tensor:
    """act(gate) * up for two tensors of one shape, act(up) for one."""
    if len(inner) == 2 and activation in _GATED:
        return _GATED[activation](*inner)
    activated = F.relu(inner[0]).square() if activation == "relu2" else F.gelu(inner[0], approximate="tanh")
    return activated * inner[1] if len(inner) == 2 else activated


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), such as SwiGLU; without a gate down(act(up(x))), as in GPT-2."""

    def __init__(self, model: Model, width: int):
        super().__init__()
        self.activation = model.activation
        self.gate_proj = nn.Linear(model.hidden_size, width, bias=model.mlp_bias) if model.gated_mlp else None
        self.up_proj = nn.Linear(model.hidden_size, width, bias=model.mlp_bias)
        self.down_proj = nn.Linear(width, model.hidden_size, bias=model.mlp_bias)
        self.column_linear, self.row_linear, self.activate = column_linear, row_linear, activate

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        """Projections that read the input."""
        return (self.up_proj,) if self.gate_proj is None else (self.gate_proj, self.up_proj)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.column_linear(hidden, *self.projections)
        return self.row_linear(self.activate(self.activation, *inner), self.down_proj)
