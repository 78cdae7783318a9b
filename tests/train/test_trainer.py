"""What a trainer passes on."""

from __future__ import annotations

import pytest
import torch
from train.small_runs import small_run

from ultrascale.parallel import apply
from ultrascale.parallel.mesh import process_group
from ultrascale.train.corpora import build_loader
from ultrascale.train.trainer import Trainer


@pytest.mark.parametrize("draw_on_device", [False, True])
def test_where_initial_weights_are_drawn_reaches_their_drawing(home, monkeypatch, draw_on_device):
    told = []
    monkeypatch.setattr(apply, "initialise", lambda *arguments, **options: told.append(options["draw_on_device"]))
    run = small_run(home)
    with process_group(run.layout, device="cpu") as ranks:
        trainer = Trainer(run, ranks, build_loader(run, run.data.sources), draw_on_device=draw_on_device)
    assert told == [draw_on_device] and isinstance(trainer.optimizer, torch.optim.AdamW)
