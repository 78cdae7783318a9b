"""Operations of torch that run, as torch itself tells of them."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Context that notes the arguments of every operation of one name, as `normal_`, in this thread."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.inputs: list[tuple[Any, ...]] = []
        self.options: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == self.name:
            self.inputs.append(args)
            self.options.append(kwargs or {})
        return func(*args, **(kwargs or {}))
