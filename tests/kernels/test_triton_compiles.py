"""Every kernel compiles for Hopper as its callers launch it, which takes no GPU: the interpreter knows of no registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton is built for Linux alone")

A_FEW_BYTES = 128
"""Of a thread, that the widest may keep in memory; with a program of four warps it is kilobytes."""
CODE = """
import json, subprocess, sys
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from ultrascale.kernels import triton_norm, triton_rotary, triton_swiglu
from ultrascale.kernels.loss import triton_loss
from ultrascale.kernels.optimizers import narrow_moments, triton_adamw

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.uint8: "*u8"}
DUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
FOLDER, made = Path(sys.argv[1]), {}

def compiled(self, *given, grid, warmup, num_warps=4, **named):
    types, values, hints = {}, {}, {}
    for place, parameter in enumerate(self.params):
        value = named[parameter.name] if parameter.name in named else given[place]
        if parameter.is_constexpr:
            types[parameter.name], values[place,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            types[parameter.name], hints[place,] = TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            types[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                hints[place,] = [["tt.divisibility", 16]]
    source, target = ASTSource(self, types, values, hints), GPUTarget("cuda", 90, 32)
    code = triton.compile(source, target=target, options={"num_warps": num_warps})
    (FOLDER / "cubin").write_bytes(code.asm["cubin"])
    told = subprocess.run([DUMP, "-res-usage", FOLDER / "cubin"], capture_output=True, text=True, check=True).stdout
    numbers = dict(word.split(":") for word in told.splitlines()[-1].split() if ":" in word and "[" not in word)
    name = f"{self.__module__.rpartition('.')[2]} {self.__name__} {len(made)}"
    made[name] = {"registers": int(numbers["REG"]), "stack": int(numbers["STACK"]), "threads": 32 * num_warps}

JITFunction.run = compiled

def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype, requires_grad=dtype.is_floating_point)

for columns in (100, 4096, 16384):  # the widest that a program holds
    x, added, weight = zeros(2, columns), zeros(2, columns), zeros(columns)
    out, total = triton_norm.add_rms_norm(x, added, weight, 1e-5)
    (out.sum() + total.sum()).backward()
triton_norm.rms_norm(zeros(2, 4096, dtype=torch.float32), zeros(4096, dtype=torch.float32), 1e-5).sum().backward()
for clamped in (False, True):
    triton_swiglu.swiglu(zeros(3, 700), zeros(3, 700), clamped=clamped).sum().backward()
for heads, width, start, planes, neighbours in ((32, 128, 0, 64, False), (128, 192, 128, 32, True)):  # Llama 8B's, DeepSeek's
    angle = zeros(1, 5, 1, planes).detach()
    triton_rotary.rotate(zeros(1, 5, heads, width), (angle, angle), start=start, neighbours=neighbours)
triton_loss.loss_and_gradient_(zeros(2, 128_256).detach(), torch.zeros(2, dtype=torch.int64))
for kind in ("bf16", "8bit"):
    weights, box = zeros(3, 4096, dtype=torch.float32).detach(), narrow_moments.WeightBox((0, 0), (3, 4096), (3, 4096))
    store = narrow_moments.Moments(narrow_moments.empty_moments(box, kind, weights), box)
    update = narrow_moments.Update(1e-3, 0.1, 0.9, 0.95, 1e-8, 1, (1 << 31, 2))
    triton_adamw.update_(weights, weights, store.state, store.rows, update)
print(json.dumps(made))
"""


def test_every_kernel_compiles_for_hopper_and_keeps_to_its_registers(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
    }
    (tmp_path / "compile_all.py").write_text(CODE)
    words = [sys.executable, str(tmp_path / "compile_all.py"), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    made = json.loads(done.stdout)
    assert len(made) == 17
    assert {name: one for name, one in made.items() if one["stack"] > A_FEW_BYTES} == {}
    assert all(one["registers"] * one["threads"] <= 65_536 for one in made.values())
