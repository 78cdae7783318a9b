"""Names of machines as people, clouds and drivers write them, mapped to those of the catalogue; and known machines outside it.

Accepts nvidia-smi's `NVIDIA A100-SXM4-80GB`, torch's `NVIDIA GeForce RTX 4090`, `H100 PCIe`, `rtx_4090`, `4090`, `h100-sxm5`.
"""

from __future__ import annotations

import re

_MAKERS = re.compile(r"^(?:(?:nvidia|amd|geforce|tesla|quadro|instinct|hgx(?=-[a-z]*\d+-)|radeon)-)+")
_FORMS = re.compile(r"-(?:sxm|oam)\d?\b|-hbm\d\w?\b|-tensor-core|-gpu\b|-generation\b")
_SIZE = re.compile(r"-(\d+)gb?\b")
USUAL_SIZES = {
    "h200": "141", "b200": "180", "b300": "288", "gb200": "186", "gb300": "279", "mi300x": "192", "mi325x": "256",
    "mi350x": "288", "mi355x": "288",
    "h20": "96", "h100": "80", "h100-pcie": "80", "h100-nvl": "94", "h800": "80", "a800": "80",
    "gh200": "96", "l40s": "48", "l4": "24", "a10g": "24", "a6000": "48", "rtx-3090": "24", "rtx-4090": "24",
    "rtx-5090": "32", "mi250x": "128", "rtx-6000-ada": "48", "a100-pcie": "80",
}  # fmt: skip
"""Memory in GB that a name may include without meaning another machine."""
OTHERS: tuple[tuple[str, str], ...] = (
    (r"tpu|v[2-7][ep]?(?:-\d+)?$|trillium|ironwood", "a TPU runs programs of XLA, whose kernels, torus of links and memory"),
    (r"gaudi|hl-\d|hpu", "a Gaudi runs kernels of its own over Ethernet, which"),
    (r"trn\d|trainium|inferentia|inf\d", "a Trainium runs programs of its own compiler, which"),
    (r"(?:apple-)?m[1-5](?:-|$)|metal|mps$", "an Apple GPU has no collectives and no fp32 sums of bf16 in torch, which"),
    (r"cerebras|wse|cs-?\d$|groq|ipu", "this machine runs programs of its own compiler, which"),
)
"""Machines for training that the planner refuses, with the reason: the laws of GEMMs, attention, collectives and the allocator
were all measured on CUDA GPUs."""


def normal_name(text: str) -> str:
    """Name of a machine in lower case, without vendor, form factor and usual memory: `NVIDIA H100 80GB HBM3` is `h100`."""
    name = re.sub(r"[\s_/]+", "-", text.strip().lower())
    name = _FORMS.sub("", _MAKERS.sub("", name))
    name = re.sub(r"^rtx-?a(?=\d)", "a", re.sub(r"^rtx(?=\d)", "rtx-", name))
    if re.fullmatch(r"[345]090", name):
        name = f"rtx-{name}"
    size = _SIZE.search(name)
    if size is not None and USUAL_SIZES.get(_SIZE.sub("", name)) == size[1]:
        name = _SIZE.sub("", name)
    return name


def why_not(name: str) -> str | None:
    """Reason why a known machine is not in the catalogue; None if the machine is unknown."""
    for pattern, reason in OTHERS:
        if re.match(pattern, name):
            return f"{reason} follow other laws than the GPUs that plans were measured on"
    return None
