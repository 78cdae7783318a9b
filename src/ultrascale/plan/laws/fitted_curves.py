"""Constants of `plan.laws.curves`, written by `benchmarks/plan/fit_compute.py`: derived numbers, not measurements.

Products: NVIDIA aiconfigurator's tables (TensorRT-LLM torch flow, 2026-08). Attention: FlashAttention-3's figures
(2024), cudnn-frontend's training benchmark (2026-09), SimuMax's system files (2026). Errors: docs/compute-model.md.
"""

from __future__ import annotations

from ultrascale.plan.laws.curves import AttentionCurve, MatmulCurve

# fmt: off
MATMUL: dict[tuple[str, str], MatmulCurve] = {
    ("a100-80", "bf16"): MatmulCurve(
        efficiency=0.8525, bandwidth_efficiency=0.9867, partial_wave=0.03772, padding=0.3829, launch_seconds=3.383e-06,
        ramp=87.48, fill=0.383, split=1117, sharpness=1.602, power_flops=1.405e+13,
        power=0.02015, operand_bytes=2,
    ),
    ("h100-sxm", "bf16"): MatmulCurve(
        efficiency=0.8438, bandwidth_efficiency=0.8272, partial_wave=0.2247, padding=0.3457, launch_seconds=2.488e-06,
        ramp=136.6, fill=0.09, split=7935, sharpness=3.675, power_flops=9.834e+11,
        power=0.1345, operand_bytes=2,
    ),
    ("h100-sxm", "fp8"): MatmulCurve(
        efficiency=0.7759, bandwidth_efficiency=0.7865, partial_wave=0.1425, padding=0.1412, cast_efficiency=0.3932,
        launch_seconds=1.191e-05, ramp=274.6, fill=0.00252, split=5.107e+04, sharpness=3.971,
        power_flops=7.461e+12, power=0.1312, operand_bytes=1,
    ),
    ("h200", "bf16"): MatmulCurve(
        efficiency=0.8468, bandwidth_efficiency=0.9143, partial_wave=0.2625, padding=0.1554, launch_seconds=2.601e-06,
        ramp=129.2, fill=0.03413, split=5697, sharpness=2.564, power_flops=1.67e+12,
        power=0.1973, operand_bytes=2,
    ),
    ("h200", "fp8"): MatmulCurve(
        efficiency=0.7792, bandwidth_efficiency=0.8224, partial_wave=0.1321, padding=0.09065, cast_efficiency=0.3127,
        launch_seconds=1.201e-05, ramp=263.2, fill=0.002552, split=4.497e+04, sharpness=2.97,
        power_flops=1.818e+13, power=0.2317, operand_bytes=1,
    ),
    ("b200", "bf16"): MatmulCurve(
        efficiency=0.8826, bandwidth_efficiency=0.8144, partial_wave=0.1658, padding=0.5916, launch_seconds=2.136e-06,
        ramp=102, fill=0.249, split=1.384e+04, sharpness=2.424, power_flops=7.905e+10,
        power=0.3153, operand_bytes=2,
    ),
    ("b200", "fp8"): MatmulCurve(
        efficiency=0.7529, bandwidth_efficiency=0.8062, partial_wave=0.0817, padding=0.4344, cast_efficiency=0.3457,
        launch_seconds=1.468e-05, ramp=170.5, fill=0.3155, split=4.433e+04, sharpness=2.181,
        power_flops=9.567e+11, power=0.1643, operand_bytes=1,
    ),
    ("gb200", "bf16"): MatmulCurve(
        efficiency=0.8526, bandwidth_efficiency=0.7841, partial_wave=0.1593, padding=0.7365, launch_seconds=2.136e-06,
        ramp=83.42, fill=0.2397, split=1.47e+04, sharpness=2.519, power_flops=8.967e+10,
        power=0.334, operand_bytes=2,
    ),
    ("gb200", "fp8"): MatmulCurve(
        efficiency=0.6333, bandwidth_efficiency=0.7828, partial_wave=0.03806, padding=0.4109, cast_efficiency=0.3514,
        launch_seconds=1.439e-05, ramp=116.5, fill=0.2649, split=5.31e+04, sharpness=2.278,
        power_flops=9.379e+13, power=0.2419, operand_bytes=1,
    ),
}
ATTENTION: dict[tuple[str, str, str], AttentionCurve] = {
    ("a100", "flash-2", "forward"): AttentionCurve((0.550, 0.695, 0.604, 0.558), ramp=21, tail=0.788, edge=141),
    ("a100", "flash-2", "backward"): AttentionCurve((0.507, 0.580, 0.468, 0.432), ramp=72.5, tail=0.397, edge=153),
    ("hopper", "flash", "forward"): AttentionCurve((0.510, 0.722, 0.780, 0.800), ramp=229, tail=0.126, edge=144),
    ("hopper", "flash", "backward"): AttentionCurve((0.498, 0.636, 0.523, 0.415), ramp=373, tail=0.161, edge=25.1),
    ("hopper", "cudnn", "forward"): AttentionCurve((0.434, 0.677, 0.666, 0.671), ramp=118, tail=0.571, edge=81.8),
    ("hopper", "cudnn", "backward"): AttentionCurve((0.457, 0.569, 0.537, 0.413), ramp=334, tail=0.115, edge=76.3),
    ("hopper", "flash-2", "forward"): AttentionCurve((0.337, 0.389, 0.385, 0.353), ramp=71.5, tail=0.479, edge=54.2),
    ("hopper", "flash-2", "backward"): AttentionCurve((0.303, 0.337, 0.337, 0.311), ramp=253, tail=0.306, edge=90),
    ("blackwell", "flash", "forward"): AttentionCurve((0.444, 0.669, 0.695, 0.642), ramp=28.8, tail=2.1, edge=331),
    ("blackwell", "flash", "backward"): AttentionCurve((0.439, 0.510, 0.433, 0.400), ramp=49.4, tail=0.346, edge=291),
}
# fmt: on
