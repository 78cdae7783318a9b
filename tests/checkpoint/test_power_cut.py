"""Whatever part of what was written has reached the disk when the power goes, the old or the new checkpoint loads.

SIGKILL cannot show this: the kernel still writes what a dead process has handed over.
"""

import shutil
from pathlib import Path

import pytest
import torch
from checkpoint import disk_model
from checkpoint.disk_model import build, recorded, states

from ultrascale import checkpoint
from ultrascale.checkpoint import Saver


def save_three_times(root: Path) -> list[tuple[dict, str]]:
    """States after each operation of: step 1, step 2 (which removes step 1), step 2 again (which replaces it)."""
    with recorded(root) as recorder, Saver(root / "run" / "checkpoints", keep=1) as saver:
        for step, value in ((1, 1.0), (2, 2.0), (2, 3.0)):
            saver.save(step, {"w": torch.full((4, 4), value), "v": torch.full((3,), value)}, {"value": value})
            recorder.promise(str(value))
    return list(states(recorder))


def broken_promises(found: list[tuple[dict, str]], scratch: Path) -> list[str]:
    """States in which less is found than was promised, or a mixture."""
    broken = []
    for number, (tree, promised) in enumerate(found):
        root = scratch / str(number)
        root.mkdir()
        build(tree, root)
        folder = checkpoint.newest_valid(root / "run" / "checkpoints")
        values = set()
        if folder is not None:
            tensors, metadata = checkpoint.load_full(folder)
            values = {number for tensor in tensors.values() for number in tensor.flatten().tolist()} | {metadata["value"]}
        if len(values) > 1 or (promised and (not values or values.pop() < float(promised))):
            broken.append(f"{sorted(tree)}: promised {promised}")
        shutil.rmtree(root)
    return broken


@pytest.mark.catalogue(35)
def test_every_state_that_a_power_cut_may_leave_has_the_last_checkpoint_or_a_later_one(tmp_path):
    (tmp_path / "disk").mkdir()
    found = save_three_times(tmp_path / "disk")
    assert len(found) > 80
    assert broken_promises(found, tmp_path) == []


@pytest.mark.catalogue(35)
def test_control_what_is_not_synced_is_lost(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    monkeypatch.setitem(disk_model.WRAPPERS, "fsync", lambda recorder, real: lambda fd: None)
    assert broken_promises(save_three_times(tmp_path / "disk"), tmp_path) != []
