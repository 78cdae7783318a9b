"""torch's products over symmetric memory on a GPU, in a group of one rank: all that one GPU can show of `layout.tp_overlap`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from ultrascale.parallel.tensor.tensor_overlap import gathered_products, overlap_in, overlaps, scattered_product

pytestmark = pytest.mark.gpu


def test_products_over_symmetric_memory_are_those_of_plain_ones(tmp_path):
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, device_id=torch.device("cuda:0")
    )
    try:
        group = dist.group.WORLD
        assert group is not None
        overlap_in(group)
        part, inner = (torch.randn(2, 256, width, device="cuda", dtype=torch.bfloat16) for width in (512, 1024))
        weights = [torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16) for rows in (512, 128, 1024)]
        assert overlaps(part, group.group_name, 256, 1)
        whole, products = gathered_products(part, weights, group.group_name)
        torch.testing.assert_close(whole, part)
        for product, weight in zip(products, weights, strict=True):
            torch.testing.assert_close(product, F.linear(part, weight))
        down = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
        torch.testing.assert_close(scattered_product(inner, down, group.group_name), F.linear(inner, down))
    finally:
        dist.destroy_process_group()
