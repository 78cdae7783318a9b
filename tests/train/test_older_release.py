"""A run that an older release began goes on under this one, which knows more keys.

`older_release/` is the folder of such a run after two of twelve steps, less what a start does not read. It has none of the keys
that came with Gemma 3, OLMo 2, and islands of several sizes.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from train.small_runs import MODEL, STEPS, curve, largest_error, same, small_run, state, stop_at, train_here
from train.test_chosen_kernels import FASTEST
from train.test_facts import write

from ultrascale.checkpoint.manifest import MANIFEST_NAME
from ultrascale.description.run import Run
from ultrascale.train.folder.differences import differences, with_defaults
from ultrascale.train.folder.resume import decisive_parts

OLD = Path(__file__).parent / "older_release"


def lacking(kept: dict[str, Any], run: Run) -> dict[str, Any]:
    """What decides `run`, without each key that has its default."""
    defaults = decisive_parts(with_defaults(run))
    changed = {
        name: {key: value for key, value in kept[name].items() if value != defaults[name].get(key)}
        for name in ("model", "batch")
    }
    assert len(kept["model"]) - len(changed["model"]) > 40
    return kept | changed


def test_the_run_of_an_older_release_goes_on_with_its_weights_and_its_choices(home: Path, no_recomputation_is_chosen) -> None:
    model = replace(MODEL, hidden_size=8, intermediate_size=8, num_hidden_layers=1, head_dim=4)
    whole = small_run(home, name="whole", model=model)
    run = replace(whole, name="tiny", layout=replace(whole.layout, recompute="auto"))
    shutil.copytree(OLD, home / "tiny")
    no_recomputation_is_chosen()
    assert train_here(whole).steps_done == train_here(run).steps_done == STEPS
    assert [step for step, *_ in curve(run)] == list(range(3, STEPS + 1))
    assert largest_error(state(run), state(whole)) < 1e-4  # another CPU has other bits
    changes = [line for line in (home / "tiny" / "log.txt").read_text().splitlines() if " (was " in line]
    assert [line.split(":")[0] for line in changes] == ["data.sources"]


def test_a_checkpoint_that_lacks_every_key_with_its_default_goes_on_to_the_same_bits(home: Path) -> None:
    whole, run = (small_run(home, name=name) for name in ("whole", "older"))
    train_here(whole)
    train_here(run, before_step=stop_at(4))
    checkpoint = home / "older" / "checkpoints" / "step-00000004"
    content = json.loads((checkpoint / MANIFEST_NAME).read_text())
    content["metadata"]["decides"] = lacking(content["metadata"]["decides"], run)
    write(checkpoint, content)
    assert train_here(run).steps_done == STEPS
    assert curve(run) == curve(whole) and same(state(run), state(whole))


def test_a_kernel_that_was_chosen_before_the_model_had_further_keys_is_taken_again(home: Path, kernel_seconds) -> None:
    kernel_seconds({"sdpa": 2e-3, "varlen": 1e-3}.__getitem__)
    run = small_run(home, name="parts", layout=FASTEST)
    train_here(run, before_step=stop_at(3))
    file = home / "parts" / "chosen_kernels.json"
    content = json.loads(file.read_text())
    for key in ("norm_placement", "scale_embedding", "zero_centered_norm"):
        del content["asked"]["model"][key]
    file.write_text(json.dumps(content))
    kernel_seconds({"sdpa": 1e-3, "varlen": 2e-3}.__getitem__)  # another day, another winner
    train_here(run)
    assert json.loads(file.read_text())["verdicts"]["attention"]["chosen"] == "varlen"


def test_a_key_that_was_not_kept_differs_only_if_it_is_not_its_default(home: Path) -> None:
    run = small_run(home, model=replace(MODEL, zero_centered_norm=True))
    now, defaults = decisive_parts(run), decisive_parts(with_defaults(run))
    assert differences(lacking(now, run), now, defaults) == []
    assert differences(lacking(decisive_parts(small_run(home)), run), now, defaults) == [
        ("model.zero_centered_norm", False, True)
    ]
