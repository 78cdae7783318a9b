"""Collectives inside one node or NVLink domain: three constants for each, made by `benchmarks/plan/fit_collectives.py`.

    t = a + b w + c sqrt(w)      a in us, b in us/MB, c in us/sqrt(MB), w the bytes of the whole buffer; by number of ranks

Measured: NVIDIA aiconfigurator's NCCL tables (NCCL 2.27 on A100, 2.29 on the others, 512 B to 512 MB, 2026-08), and what
`fit_collectives.PUBLISHED` lists above 512 MB. Held-out error over all sizes: 4 to 8 percent, all-to-alls 5 to 12.
GB200 has no row of its own: on 2 and 4 ranks its bandwidths are within 3 percent of B200's.
"""

from __future__ import annotations

Fit = dict[int, tuple[float, float, float]]

# fmt: off
FITS: dict[str, dict[str, Fit]] = {
    "a100_sxm": {
        "all_gather": {2: (9.1, 2.856, 9.07), 4: (11, 3.404, 10.5), 8: (14.6, 3.851, 10.5)},
        "all_reduce": {2: (9.77, 4.493, 12), 4: (13.5, 6.375, 12), 8: (21.1, 7.371, 12.6)},
        "all_to_all": {2: (10.9, 2.588, 7.86), 4: (12, 3.482, 7.87), 8: (12.8, 3.884, 8.99)},
        "reduce_scatter": {2: (9.06, 2.492, 8.08), 4: (10.6, 3.232, 9.21), 8: (14, 3.742, 9.21)},
    },
    "b200_sxm": {
        "all_gather": {2: (8.96, 0.9573, 2.93), 4: (11.5, 1.061, 4.13), 8: (16.2, 1.061, 6.28)},
        "all_reduce": {2: (9.99, 1.648, 3.71), 4: (14.7, 2.032, 5.72)},
        "all_reduce_in_switch": {8: (23.8, 2.067, 9.8)},
        "all_to_all": {2: (10.1, 1.274, 3.38), 4: (10.8, 1.274, 4.05), 8: (11.5, 1.274, 5.29)},
        "reduce_scatter": {2: (8.93, 1.087, 2.31), 4: (11.5, 1.125, 3.57), 8: (15.8, 1.125, 5.55)},
    },
    "h100_sxm": {
        "all_gather": {2: (5.04, 1.725, 4.98), 4: (7.01, 2.13, 5.38), 8: (10.5, 2.366, 5.38)},
        "all_reduce": {2: (5.88, 2.951, 5.93), 4: (9.3, 4.007, 5.93)},
        "all_reduce_in_switch": {8: (15.2, 3.513, 9.33)},
        "all_to_all": {2: (7.1, 1.464, 4.92), 4: (7.56, 2.26, 4.92), 8: (8.33, 2.522, 4.92)},
        "reduce_scatter": {2: (5.24, 1.944, 3.71), 4: (7.03, 2.294, 3.71), 8: (10, 2.415, 3.71)},
    },
    "h200_sxm": {
        "all_gather": {2: (5.01, 1.728, 4.65), 4: (7.18, 2.136, 4.81), 8: (11.4, 2.365, 4.81)},
        "all_reduce": {2: (6.01, 2.984, 5.19), 4: (9.5, 4.039, 5.19)},
        "all_reduce_in_switch": {8: (15.8, 3.35, 9.84)},
        "all_to_all": {2: (7.14, 1.423, 4.56), 4: (7.4, 2.11, 4.63), 8: (8.26, 2.57, 4.63)},
        "reduce_scatter": {2: (5.14, 1.93, 3.46), 4: (6.99, 2.266, 3.46), 8: (10.9, 2.417, 3.46)},
    },
}
# fmt: on
