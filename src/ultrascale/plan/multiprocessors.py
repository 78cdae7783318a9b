"""How many processors (streaming multiprocessors, compute units) a device has: vendors' architecture white papers."""

MULTIPROCESSORS = {
    "v100": 80, "v100-16": 80, "v100-32": 80,
    "a100-40": 108, "a100-80": 108, "a800": 108, "a800-80": 108, "a100-pcie": 108,
    "h100-sxm": 132, "h100-96": 132, "h800": 132, "h200": 132, "gh200": 132, "h100-pcie": 114, "h100-nvl": 132, "h20": 78,
    "b200": 148, "b300": 148, "gb200": 152, "gb300": 152,
    "l40s": 142, "l4": 58, "a10g": 80, "a6000": 84, "rtx-6000-ada": 142, "rtx-3090": 82, "rtx-4090": 128, "rtx-5090": 170,
    "mi250x": 110, "mi300x": 304, "mi325x": 304, "mi350x": 256, "mi355x": 256,
}  # fmt: skip
