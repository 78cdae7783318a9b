"""fp8 put on a model: the products of its blocks, through the seams around them.

In fp8: queries, keys, values and attention's output, gate, up and down. In bf16 stay the embedding, the head and its loss,
norms, attention itself, latent attention's narrow projections, multi-token prediction, and the first and last
`fp8_keep_blocks` blocks, which are the most sensitive. Parameters, their gradients and what FSDP2 gathers and reduces are as
with bf16: fp8 is a matter of products alone.
"""

from __future__ import annotations

from torch import Tensor, nn

from ultrascale.kernels.fp8 import Scaling, fp8_linear
from ultrascale.models.decoder import Decoder
from ultrascale.spec.layout import Layout


class Fp8Seams:
    """What the seams of a block call."""

    def __init__(self, scaling: Scaling):
        self.scaling: Scaling = scaling

    def fan_out(self, hidden: Tensor, *projections: nn.Linear) -> tuple[Tensor, ...]:
        """Several projections of one input, which is rounded once."""
        biases: list[Tensor] = [projection.bias for projection in projections if projection.bias is not None]
        assert len(biases) in (0, len(projections)), "projections of one input all have a bias, or none"
        return fp8_linear(hidden, [projection.weight for projection in projections], biases, self.scaling)

    def fan_in(self, inner: Tensor, projection: nn.Linear) -> Tensor:
        """The projection back to the residual stream."""
        return self.fan_out(inner, projection)[0]


def apply_fp8(decoder: Decoder, layout: Layout) -> None:
    """Let the blocks of `decoder` compute in fp8 as `layout` says, in place. Does nothing for other precisions."""
    if layout.precision != "fp8":
        return
    seams, count = Fp8Seams(layout.fp8_scaling), decoder.spec.num_hidden_layers
    for number, block in decoder.blocks():
        if layout.fp8_keep_blocks <= number < count - layout.fp8_keep_blocks:
            for module in block.modules():
                for seam in ("fan_out", "fan_in"):
                    if hasattr(module, seam):
                        setattr(module, seam, getattr(seams, seam))
