"""Every kernel of the primer compiles to machine code for Hopper, which takes no GPU: the interpreter sees no type and no shape
that only the compiler refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys

CODE = """
import json
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ultrascale.primer.exercises import access, attention, coarsening, divergence, softmax, tiles

FP32, BF16, INT = "*fp32", "*bf16", "i32"
sides = {"x": FP32, "out": FP32, "count": INT, "up": "fp32", "more": "fp32", "down": "fp32", "less": "fp32"}
matrices, rows = {"a": BF16, "b": BF16, "c": BF16, "n": INT, "k": INT}, {"x": BF16, "out": BF16, "width": INT}
sheet = {"x": FP32, "weights": FP32, "out": FP32, "rows": INT, "width": INT}
heads = {"query": BF16, "key": BF16, "value": BF16, "out": BF16, "length": INT, "scale": "fp32"}
kernels = [
    (access._take_every, {"source": FP32, "target": FP32, "count": INT, "stride": INT}, {"BLOCK": 1024}),
    (tiles._row_by_row, matrices, {"COLUMNS": 128}),
    (tiles._tiled, matrices | {"m": INT}, {"ROWS": 128, "COLUMNS": 128, "DEPTH": 64}),
    (coarsening._scale_columns, sheet, {"ROWS": 16, "BLOCK": 256}),
    (divergence._lanes_disagree, sides, {"ROUNDS": 512, "BLOCK": 256}),
    (divergence._programs_disagree, sides, {"ROUNDS": 512, "BLOCK": 256}),
    (softmax._naive, rows, {"BLOCK": 8192}),
    (softmax._online, rows, {"BLOCK": 8192}),
    (softmax._held, rows, {"BLOCK": 4096}),
    (attention._flash, heads, {"WIDTH": 128, "QUERIES": 128, "KEYS": 64}),
]
sizes = {}
for kernel, types, constants in kernels:
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    made = compile(ASTSource(fn=kernel, signature=signature, constexprs=values), target=GPUTarget("cuda", 90, 32),
                   options={"num_warps": 8})
    sizes[kernel.__name__] = len(made.asm["cubin"])
print(json.dumps(sizes))
"""


def test_all_kernels_compile_for_hopper(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    (tmp_path / "compile_all.py").write_text(CODE)
    words = [sys.executable, str(tmp_path / "compile_all.py")]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = json.loads(done.stdout)
    assert len(sizes) == 10 and all(size > 1000 for size in sizes.values())
