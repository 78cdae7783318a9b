"""Tests marked `gpu` are collected only where there is a CUDA device."""

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=for_gpu)
    items[:] = [item for item in items if item not in for_gpu]
