"""Cache of operations' result shapes: makes the results of repeated operations without torch's shape functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def key_of(value: Any) -> Any:
    """Hashable key of everything that a result's shape depends on. Raises TypeError if there is none."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, list | tuple):
        return tuple(map(key_of, value))
    return type(value), value


def recipe_of(result: Any, args: Any, options: Any) -> Any:
    """Recipe to make the result again; False if the result is a view, or its storage is larger than its shape needs."""
    inputs = {tensor.untyped_storage()._cdata for tensor in tensors_in((*args, *options.values()))}
    return _recipe(result, inputs)


def _recipe(result: Any, inputs: set[int]) -> Any:
    if isinstance(result, Tensor):
        storage = result.untyped_storage()
        if result.device.type != "meta" or result.storage_offset() or storage._cdata in inputs:
            return False
        return (Tensor, tuple(result.shape), result.stride(), result.dtype) if storage.nbytes() == _extent(result) else False
    if isinstance(result, list | tuple):
        parts = [_recipe(part, inputs) for part in result]
        return False if False in parts else (list if isinstance(result, list) else tuple, parts)
    return (None, result)


def _extent(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.itemsize


def from_recipe(recipe: Any) -> Any:
    """New tensors on the meta device, made from a recipe."""
    kind = recipe[0]
    if kind is Tensor:
        return torch.empty_strided(recipe[1], recipe[2], dtype=recipe[3], device="meta")
    if kind is None:
        return recipe[1]
    return kind(from_recipe(part) for part in recipe[1])
