"""Whether rows of measured runs, and the same settings given to `plan`, are one number: step time, memory and verdict.

    python benchmarks/plan/one_answer.py measured_runs.csv measured_oom.csv playbook_runs.csv

Every row is read, what it means is written as a run, its machines, and a stack with the settings that a user would type, and
planned as `ultrascale plan RUN.TOML --stack NAME --stack.KEY VALUE` plans it.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Annotated

import tyro

from ultrascale.catalogue.stacks.stack_files import changed_settings, changed_stack
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Batch, Data, Run
from ultrascale.plan.report import plan_run
from ultrascale.validation.predict import RowPrediction, predict_rows
from ultrascale.validation.rows import read_rows
from ultrascale.validation.setups import Setup, setup_of


def main(files: Annotated[tuple[Path, ...], tyro.conf.Positional], /, every: int = 1) -> int:
    """Compare.

    Args:
        files: CSV files of measured runs.
        every: Of the rows every so many; a plan takes some tens of milliseconds.
    """
    rows = [row for file in files for row in read_rows(file)][::every]
    same, differ, without = 0, [], 0
    for row, predicted in zip(rows, predict_rows([row.config for row in rows]), strict=True):
        if predicted.step_seconds is None:
            without += 1
            continue
        if answers(setup_of(row.config), predicted):
            same += 1
        else:
            differ.append(row.identity)
    print(f"{same:,} of {same + len(differ):,} rows are one number; {without:,} have none")
    print("\n".join(differ))
    return 1 if differ else 0


def answers(setup: Setup, predicted: RowPrediction) -> bool:
    """Whether one of the plans that the row may mean is its prediction."""
    for workload, layout in itertools.product(setup.workloads, setup.layouts):
        batch = Batch(workload.sequence_length, workload.sequences_per_batch)
        run = Run(workload.model, layout=layout, batch=batch, data=Data(document_mask=False))
        typed = {key: str(value) for key, value in changed_settings(workload.stack).items()}
        stack = changed_stack(workload.stack.name, typed | {"optimizer": workload.stack.optimizer})
        try:
            found = plan_run(run, workload.cluster, stack).prediction
        except SpecError:
            continue
        if found is not None and math.isclose(found.step_seconds, predicted.step_seconds or 0.0, rel_tol=1e-12):
            return float(found.memory.allocated) == predicted.allocated_bytes and bool(found.memory.fits) is predicted.fits
    return False


if __name__ == "__main__":
    raise SystemExit(tyro.cli(main))
