"""Facts of schedules: tied to their lists of actions, said in one place, and all that a new schedule needs beside its order."""

import ast
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from tidy.sources import MODULES, PACKAGE, ROOT, parsed

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Batch, Run
from ultrascale.description.schedules import SCHEDULE_ALIASES, SCHEDULES
from ultrascale.plan.columns.rank_loads import PipelineShape, loads_of
from ultrascale.plan.layouts import LayoutTable
from ultrascale.schedules.actions import Kind
from ultrascale.schedules.build import build_schedule, enough_micro_batches, stages_of_ranks
from ultrascale.schedules.kinds.custom import to_csv
from ultrascale.trace.planned import planned_rank

KNOWN = pytest.mark.parametrize("one", SCHEDULES.values(), ids=list(SCHEDULES))
PP, COUNT = 4, 32
SPELLED = {
    "description/schedules.py": "the table",
    "check/matrix.py": "cells of the proof that are chosen by hand, beside those of every schedule",
}
"""Files that name schedules, and why."""


@KNOWN
def test_facts_of_a_schedule_are_those_of_its_lists(one):
    virtual_stages = one.stages_a_rank(3)
    schedule = build_schedule(one.name, PP, COUNT, virtual_stages)
    held = stages_of_ranks(one.name, PP, virtual_stages)
    kinds = {part.kind for row in schedule for action in row for part in action.parts}
    halves = "" if Kind.INPUT_GRADIENT not in kinds else "ends" if Kind.BACKWARD in kinds else "all"
    assert one.splits_backward == halves
    assert [sorted(stages) for stages in one.stages_of_ranks(PP, PP * virtual_stages)] == held
    assert one.copies == sum(map(len, held)) / (PP * virtual_stages)
    assert one.pairs == any(action.overlapped_with for row in schedule for action in row)
    ahead = [next(n for n, action in enumerate(row) if action.parts[-1].kind is not Kind.FORWARD) for row in schedule]
    assert one.forward_first == (min(ahead) == COUNT * virtual_stages)


@KNOWN
@pytest.mark.parametrize("pp", [2, 6])
def test_a_few_micro_batches_hold_as_much_as_many(one, pp):
    virtual_stages, many = one.stages_a_rank(2), 7 * pp
    few = enough_micro_batches(one.name, pp, many)
    if one.forward_first:
        assert few == many
        return
    one_each = (1,) * (pp * virtual_stages)
    rows = [
        loads_of(PipelineShape(one.name, pp, virtual_stages, count, one_each, (0,) * len(one_each), 1)) for count in (few, many)
    ]
    assert few < many
    held = f"SCHEDULES[{one.name!r}].warm_up x pp micro-batches do not fill its pipeline: raise warm_up"
    assert rows[0].rows.tolist() == rows[1].rows.tolist(), held


BF16 = Layout(dp=2, zero_stage=2, pp=4, precision="bf16", recompute="full")


@KNOWN
@pytest.mark.parametrize(("count", "base", "rank"), [(48, BF16, 2), (49, BF16, 2), (31, Layout(pp=4), 2)])
def test_a_few_micro_batches_tell_the_memory_and_the_messages_of_a_step_of_many(one, count, base, rank, tmp_path):
    """A schedule from a file is replayed whole. 31: rounds of interleaved stages, of 5 and of 4, meet in the middle."""
    layout = replace(base, schedule=one.name, virtual_stages=one.stages_a_rank(3))
    model = replace(PRESETS["tiny-llama"], num_hidden_layers=12 if one.in_rounds else 2 * layout.num_stages)
    run = Run(model, layout=layout, batch=Batch(sequence_length=64, sequences_per_batch=base.dp * count))
    written = tmp_path / "written.csv"
    written.write_text(to_csv(build_schedule(one.name, 4, count, layout.virtual_stages)))
    whole = planned_rank(replace(run, layout=replace(layout, schedule=str(written))), rank, "cuda")
    few = planned_rank(run, rank, "cuda")
    assert (few.peak, few.traffic, few.flops) == (whole.peak, whole.traffic, whole.flops)


def names_spelled(path):
    """Strings of a file, docstrings apart, that name a schedule."""
    if not any(name in path.read_text() for name in (*SCHEDULES, *SCHEDULE_ALIASES)):
        return []
    words = re.compile(rf"(?<![\w-])(?:{'|'.join(SCHEDULES)})(?![\w-])|^(?:{'|'.join(SCHEDULE_ALIASES)})$")
    told = {id(node.value) for node in ast.walk(parsed(path)) if isinstance(node, ast.Expr)}
    strings = (node for node in ast.walk(parsed(path)) if isinstance(node, ast.Constant) and id(node) not in told)
    return [node.value for node in strings if isinstance(node.value, str) and words.search(node.value)]


def test_no_file_but_the_table_names_a_schedule():
    found = {str(path.relative_to(PACKAGE)) for path in MODULES if names_spelled(path)}
    assert found == set(SPELLED)


def test_a_table_of_layouts_refuses_a_schedule_that_it_lacks():
    with pytest.raises(SpecError, match="known by name alone"):
        LayoutTable.of([Layout(pp=2, schedule="own.csv")])
    assert LayoutTable.of([Layout(schedule="own.csv")]).layout(0) == Layout()


NEW = """
import sys
from dataclasses import replace
from types import ModuleType

import pytest

from ultrascale.description import schedules

def add(name, like, order, **facts):
    row = replace(schedules.SCHEDULES[like], name=name, builder=name, pattern=name, aliases=(), torch="", **facts)
    schedules.SCHEDULES[name] = row
    module = sys.modules[f"ultrascale.schedules.kinds.{name}"] = ModuleType(name)
    setattr(module, name, order)

from ultrascale.schedules.actions import backward, forward
from ultrascale.schedules.kinds.one_f_one_b import alternate
from ultrascale.schedules.kinds.zb_h1 import zb_h1

def deep(pp, num_micro_batches):
    "1F1B with twice its warm-up: a round reads what is older than the round before."
    rows = [[[step(rank, k) for k in range(num_micro_batches)] for step in (forward, backward)] for rank in range(pp)]
    return [alternate(*row, ahead=2 * (pp - 1 - rank)) for rank, row in enumerate(rows)]

add("later", "zb-h1", lambda pp, num_micro_batches: zb_h1(pp, num_micro_batches))
add("deep", "1f1b", deep, warm_up=2)

import ultrascale as us
from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.check.matrix import cells
from ultrascale.config.rules.trainable import untrainable_layout
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Run
from ultrascale.page.controls import CONTROLS
from ultrascale.plan.pipeline.pipeline_bounds import bubble_seconds
from ultrascale.plan.report import workload_of
from ultrascale.plan.time.price import predict
from ultrascale.schedules.for_layout import schedule_of

EXAMPLE = Run(PRESETS["llama-3.2-1b"], batch=Batch(2048, 64))
new, old = Layout(dp=2, pp=4, schedule="later"), Layout(dp=2, pp=4, schedule="zb-h1")
assert new.problems() == untrainable_layout(new) == []
assert schedule_of(new, 8) == schedule_of(old, 8)
assert untrainable_layout(replace(new, mlp_chunks=2)) != []
sizes = ([2, 4, 4], 1, [5, 64, 9], [1.0, 2.0, 1.5], 1.0, [0.5, 1.0, 2.0])
assert bubble_seconds("later", *sizes) == pytest.approx(bubble_seconds("zb-h1", *sizes))
usual, deeper = (bubble_seconds(name, [3, 8], 1, [13, 200], 1.0, 1.0, 1.0) for name in ("1f1b", "deep"))
assert deeper == pytest.approx(usual)
assert any("later" in control.choices for control in CONTROLS)
assert any(cell.row == "later" and not cell.refused for cell in cells())
assert {one.name for one in us.schedule(pp=2, micro_batches=4)} == {*schedules.SCHEDULES}
runs = [replace(EXAMPLE, layout=layout) for layout in (new, old)]
first, second = (predict(workload_of(run, parse_cluster("8xh100"), STACKS["ultrascale"]), run.layout) for run in runs)
assert (first.step_seconds, first.memory.allocated) == (second.step_seconds, second.memory.allocated)
"""


def test_a_new_schedule_is_its_order_and_a_row():
    done = subprocess.run([sys.executable, "-c", NEW], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@KNOWN
def test_the_page_about_schedules_has_its_facts(one):
    also = ", ".join([*one.aliases, *([f"torch's {one.torch}"] if one.torch else [])])
    cut = {"": "", "all": "all", "ends": "filling, draining"}[one.splits_backward]
    stages = str(one.virtual_stages * one.copies) if one.virtual_stages else "2 or more"  # DualPipe: one of each direction
    facts = [f"`{one.name}`", also, stages, one.placement, cut, one.paper]
    assert f"| {' | '.join(facts)} |" in (ROOT / "docs" / "schedules.md").read_text().splitlines()


def test_torch_has_the_schedules_that_it_is_said_to_have():
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules")
    assert all(hasattr(theirs, f"Schedule{one.torch}") for one in SCHEDULES.values() if one.torch)
