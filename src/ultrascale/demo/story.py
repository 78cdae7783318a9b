"""The demo, stage by stage. Each stage prints the command that does the same, and ends in claims.

text  ->  plan  ->  prove  ->  train, kill, resume  ->  planned and measured  ->  loss  ->  sample  ->  export  ->  plots

    folder    holds all output of the demo: created, locked, and cleared only of an earlier demo's files
    run       a TOML file, sized so that training takes one to three minutes on this machine
    loss      a text curve, with the unigram entropy: the loss of a model that knows only the frequency of each token
"""

from __future__ import annotations

import fcntl
import json
import logging
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.text import Text

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.config.resolve import resolve
from ultrascale.data.corpus import Corpus
from ultrascale.data.files import DataError
from ultrascale.data.preparing.prepare import Prepared, Progress
from ultrascale.demo.claims import Claim, judged
from ultrascale.demo.screen import INDENT, Screen
from ultrascale.demo.stages.exported import PROMPTS, compare_with_transformers, continue_prompts, export_newest, sample_words
from ultrascale.demo.stages.interrupted import train_and_kill
from ultrascale.demo.stages.proof import plant_faults, prove_layouts
from ultrascale.demo.stages.rehearsal import rehearse, step_seconds
from ultrascale.demo.stages.text import VOCABULARY, library_folder, prepare_library, prepare_words
from ultrascale.description.layout import Precision
from ultrascale.description.problems import mistake
from ultrascale.description.run import Run
from ultrascale.description.units import format_bytes, format_count, format_flops_per_second, format_seconds
from ultrascale.measure.compare import CategoryDifference, comparison_table
from ultrascale.measure.plots import plot_run_folder, read_metrics
from ultrascale.measure.run_marks import marks_of
from ultrascale.plan.report import plan_run
from ultrascale.plan.view.plan_view import show_plan

MEMORY_PERCENT = 3.0
"""Largest difference between the planned and the measured peak."""
STEP_PERCENT = 10.0
"""Largest difference between the planned and the measured step time in percent. A busy machine exceeds it, which the table then
reports without failing."""
WELL_BELOW_NATS = 1.0
"""Least drop of the loss below the unigram entropy: the next token is e times as likely on (geometric) average."""
PICTURE_WIDTH = 72
"""Columns of the loss curve."""
LATE_STEPS = 8
"""Steps after a checkpoint that are lost by the kill."""


@dataclass
class Demo:
    """State that the stages share."""

    folder: Path
    screen: Screen
    started: float = field(default_factory=time.perf_counter)
    claims: list[Claim] = field(default_factory=list)

    @property
    def run_file(self) -> Path:
        return self.folder / "run.toml"

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"


def run_demo(folder: Path, screen: Screen) -> Demo:
    """Run the whole demo in `folder`. Raises DemoError if it cannot continue."""
    library = library_folder()
    with demo_folder(folder):
        demo = Demo(folder, screen)
        screen.show("[dim]No GPU, no network: a language model from text to export, on two processes of this machine.[/]")
        with screen.stage("Text: Python's own standard library"):
            entropy = _text(demo, library)
        with screen.stage("Plan: predicted memory and time"):
            run, planned = _plan(demo)
        with screen.stage("Prove: two processes compute what one process computes"):
            _prove(demo, run)
        with screen.stage("Train, with one process killed"):
            _train(demo, run)
        rows = read_metrics(demo.run_folder / "metrics.jsonl")
        memory = json.loads((demo.run_folder / "memory.json").read_text())
        with screen.stage("Compare: planned with measured"):
            _compare(demo, planned, rows, memory)
        with screen.stage("Loss: compared with a model that ignores context"):
            _loss(demo, rows, entropy)
        with screen.stage("Sample: text that the model writes"):
            _sample(demo)
        with screen.stage("Export: the model in transformers"):
            _export(demo, run)
        with screen.stage("Plots"):
            _plots(demo, entropy)
        _close(demo)
    return demo


def _text(demo: Demo, library: Path) -> float:
    """Prepare the text. Returns the entropy of the held-out part's tokens, in nats."""
    data, screen = demo.folder / "data", demo.screen
    screen.command(*prepare_words(library, data))
    try:
        made = _prepare(demo, library, data)
    except DataError:  # prepared by an earlier demo from another Python, or interrupted in a way that cannot be resumed
        forget_text(demo.folder)
        made = _prepare(demo, library, data)
    assert made.validation is not None
    entropy = unigram_entropy(data / "validation")
    screen.show(
        f"{made.manifest.tokens:,} tokens of {made.manifest.documents} files to train on, {made.validation.tokens:,} of "
        f"{made.validation.documents} files held out; a byte-level BPE of {made.manifest.tokenizer.vocab_size:,} tokens."
    )
    return entropy


def _prepare(demo: Demo, library: Path, data: Path) -> Prepared:
    with demo.screen.bar("preparing", 1) as advance:

        def on_progress(now: Progress) -> None:
            note = "training the tokenizer" if now.stage == "tokenizer" else f"{now.tokens:,} tokens"
            advance(now.done_bytes / max(1, now.total_bytes), note)

        return prepare_library(library, data, on_progress=on_progress)


def _plan(demo: Demo) -> tuple[Run, float]:
    """Rehearse, choose precision and length of the run, and plan it; returns the run, and the predicted seconds of a step."""
    draft = write_run(demo.folder)
    rehearsal = rehearse(draft)
    precision = rehearsal.fastest
    rate = rehearsal.flops_per_second[precision]
    draft = replace(draft, layout=replace(draft.layout, precision=precision))
    seconds = step_seconds(draft, rate)
    run = write_run(demo.folder, precision=precision, steps=fitting_steps(seconds))
    plan = plan_run(run, parse_cluster(f"{PROCESSES}xcpu"))
    screen = demo.screen
    screen.command("plan", str(demo.run_file))
    screen.draw(lambda console: show_plan(plan, console))
    rates = ", ".join(f"{name} {format_flops_per_second(r)}" for name, r in rehearsal.flops_per_second.items())
    screen.show(f"\nRehearsed here, a process reaches {rates}: so {precision}.")
    screen.show(
        f"A step of {format_count(run.batch.sequences_per_batch * run.batch.sequence_length)} tokens should take [bold]"
        f"{format_seconds(seconds)}[/], and {run.steps} of them fit the time that the demo has."
    )
    return run, seconds


def _prove(demo: Demo, run: Run) -> None:
    screen = demo.screen
    for flags, prove in (([], prove_layouts), (["--own-layout", "--plant", "all"], plant_faults)):
        screen.command("check", str(demo.run_file), *flags)
        claim = prove(run)
        demo.claims.append(claim)
        screen.show(f"{claim.number}.")
        for fault, parameter in claim.facts.get("seen", {}).items():
            screen.show(f"[dim]  {fault:<15} {f'seen in the gradient of {parameter}' if parameter else 'MISSED'}[/]")


def _train(demo: Demo, run: Run) -> None:
    screen, log = demo.screen, demo.folder / "training.log"
    every = run.steps // SAVES
    screen.command("train", str(demo.run_file), "--processes", str(PROCESSES))
    screen.show(f"[dim]What it says goes to {log}. After step {2 * every + LATE_STEPS} one process gets SIGKILL.[/]")
    with screen.bar("training", run.steps) as advance:
        cut = train_and_kill(
            demo.run_file, demo.run_folder, processes=PROCESSES, kill_at=2 * every + LATE_STEPS, log=log,
            watch=lambda rows: advance(*_progress(rows, run)),
        )  # fmt: skip
    equal = "all with the losses of before, to the last bit" if cut.same_losses else "with other losses than before"
    screen.show(
        f"Process {cut.killed_pid} was killed after step {cut.steps_before}. The run went on by itself from the checkpoint of "
        f"step {cut.resumed_at}: back at work after {cut.recovery_seconds:.1f} s, {cut.steps_redone} steps redone, {equal}."
    )
    demo.claims.append(
        judged(
            "a run survives SIGKILL",
            f"back after {cut.recovery_seconds:.1f} s, {cut.steps_redone} steps redone, losses "
            f"{'bit-equal' if cut.same_losses else 'DIFFERENT'}",
            cut.same_losses,
            recovery_seconds=cut.recovery_seconds, steps_redone=cut.steps_redone, steps_before=cut.steps_before,
            resumed_at=cut.resumed_at,
        )
    )  # fmt: skip


def _progress(rows: list[dict[str, Any]], run: Run) -> tuple[float, str]:
    if not rows:
        return 0, "starting the processes"
    last = rows[-1]
    speed = last.get("perf/tokens_per_s")
    note = f"{last['step']:>3} of {run.steps} steps   loss {last['train/loss']:.2f}"
    return last["step"], note + (f"   {speed:,.0f} tokens/s" if speed else "")


def _compare(demo: Demo, planned: float, rows: list[dict[str, Any]], memory: dict[str, Any]) -> None:
    screen = demo.screen
    table = comparison_table([CategoryDifference(**row) for row in memory["by_category"]])
    screen.show(
        "[dim]Live bytes of rank 0's tensors, counted over the first four steps; differences in percent of the peak.[/]"
    )
    screen.show(table)
    percent = memory["difference_percent"]
    demo.claims.append(
        judged(
            "peak memory is as planned",
            f"{format_bytes(memory['planned_peak_bytes'])} planned, {format_bytes(memory['measured_peak_bytes'])} measured: "
            f"{_signed(percent, 1)}%",
            abs(percent) <= MEMORY_PERCENT,
            planned_bytes=memory["planned_peak_bytes"], measured_bytes=memory["measured_peak_bytes"], percent=percent,
        )
    )  # fmt: skip
    measured = median(row["perf/step_s"] for row in rows if row.get("perf/step_s"))
    off = _signed(100 * (planned / measured - 1), 0)
    number = f"{format_seconds(planned)} planned, {format_seconds(measured)} measured: {off}%"
    screen.show(f"\nA step: {number}. [dim]Not in the plan: {_NOT_PLANNED}.[/]")
    facts = {"planned_seconds": planned, "measured_seconds": measured}
    verdict = "holds" if abs(planned / measured - 1) <= STEP_PERCENT / 100 else "missed"
    demo.claims.append(Claim("a step takes as long as planned", number, verdict, facts))


_NOT_PLANNED = "communication, the optimizer, and other work on this machine"


def _loss(demo: Demo, rows: list[dict[str, Any]], entropy: float) -> None:
    held_out = next(row["val/loss"] for row in reversed(rows) if "val/loss" in row)
    marks = [(mark.step, mark.text) for mark in marks_of(demo.run_folder)]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    width = min(PICTURE_WIDTH, demo.screen.console.width - 2 * INDENT - 8)
    demo.screen.show(Text(loss_curve(losses, width=width, marks=marks)))
    demo.screen.show(
        f"Knowing only how often each token occurs costs [bold]{entropy:.2f}[/] nats a token of the held-out text (its unigram "
        f"entropy).\nThe model, which has never seen that text, needs [bold]{held_out:.2f}[/]; it began at "
        f"{rows[0]['train/loss']:.2f}."
    )
    demo.claims.append(
        judged(
            "the loss is well below the unigram entropy",
            f"{held_out:.2f} nats on held-out text, entropy {entropy:.2f}",
            held_out <= entropy - WELL_BELOW_NATS,
            held_out_loss=held_out, unigram_entropy=entropy, first_loss=rows[0]["train/loss"],
        )
    )  # fmt: skip


def _sample(demo: Demo) -> None:
    from rich.panel import Panel
    from rich.syntax import Syntax

    screen = demo.screen
    screen.command(*sample_words(demo.run_folder, PROMPTS[0]))
    for text in continue_prompts(demo.run_folder):
        code = Syntax(text, "python", theme="ansi_light", background_color="default", word_wrap=True)
        screen.show(Panel(code, border_style="dim", padding=(0, 1), width=screen.console.width - 2 * INDENT))


def _export(demo: Demo, run: Run) -> None:
    screen, target = demo.screen, demo.folder / "exported"
    screen.command("export", str(demo.run_folder), str(target))
    for claim in (export_newest(demo.run_folder, target), compare_with_transformers(target, run)):
        demo.claims.append(claim)
        screen.show(f"{claim.text[0].upper()}{claim.text[1:]}: {claim.number}.")


def _plots(demo: Demo, entropy: float) -> None:
    text = "loss, memory and speed as pictures"
    if find_spec("matplotlib") is None:
        demo.claims.append(Claim(text, "matplotlib is not installed: pip install matplotlib", "skipped"))
        demo.screen.show("Skipped: matplotlib is not installed (pip install matplotlib).")
        return
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it reports its search for fonts
    rows, into = read_metrics(demo.run_folder / "metrics.jsonl"), demo.folder / "plots"
    written = plot_run_folder(demo.run_folder, rows, into=into, reference_loss=("unigram entropy", entropy))
    for path in written:
        demo.screen.show(str(path))
    good = len(written) == 3 and all(path.stat().st_size > 0 for path in written)
    demo.claims.append(
        judged(text, f"{len(written)} PNGs in {demo.folder / 'plots'}", good, files=[str(path) for path in written])
    )


def _close(demo: Demo) -> None:
    """Print the claims, and next steps."""
    seconds, screen = time.perf_counter() - demo.started, demo.screen
    screen.console.print("\n[bold]In short[/]")
    screen.claims(demo.claims)
    first_words = {re.split("[:,]", title)[0].lower(): seconds_of_stage for title, seconds_of_stage in screen.spent.items()}
    spent = "  ".join(f"{word} {seconds_of_stage:.0f}" for word, seconds_of_stage in first_words.items())
    screen.show(f"\n[dim]{format_seconds(seconds)} in all. Seconds by stage: {spent}[/]\n")
    screen.show(f"Everything is in [bold]{demo.folder}[/]. To look around:")
    screen.command("show", str(demo.run_file))
    screen.command("report", str(demo.run_folder))
    screen.command("checkpoint", "list", str(demo.run_folder))
    screen.command("generate", str(demo.run_folder), "--prompt", "import ")
    screen.show("\nNext, your own text: a folder of files, and the same run on it.")
    prepared = str(demo.folder / "mine")
    screen.command(
        "data", "prepare", "YOUR_FOLDER", "--train-tokenizer", str(VOCABULARY), "--validation-fraction", "0.05",
        "--output", prepared,
    )  # fmt: skip
    settings = ("--data.sources", prepared, "--data.validation", f"{prepared}/validation", "--name", "mine")
    screen.command("train", str(demo.run_file), *settings)
    summary = {
        "seconds": seconds,
        "stage_seconds": screen.spent,
        "claims": [asdict(claim) for claim in demo.claims],
    }
    (demo.folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def _signed(value: float, decimals: int) -> str:
    """`+3.1`, `-0.2`, and plain `0.0` for what rounds to nothing."""
    rounded = round(value, decimals)
    return f"{rounded:+.{decimals}f}" if rounded else f"{0:.{decimals}f}"


_BLOCK = 1 << 20


def token_counts(path: str | Path) -> np.ndarray:
    """Count of each id in a prepared folder or prefix, int64 [largest id + 1]. Reads in blocks: memory stays flat."""
    corpus = Corpus(path)
    counts = np.zeros(corpus.tokenizer.vocab_size if corpus.tokenizer else 1, np.int64)
    for start in range(0, corpus.num_tokens, _BLOCK):
        for index, first, last in corpus.pieces(start, min(_BLOCK, corpus.num_tokens - start)):
            ids = corpus.shard(index).tokens[first:last]
            if int(ids.min()) < 0:
                corpus.shard(index).check_ids(first, last, 2**31)
            block_counts = np.bincount(ids, minlength=len(counts))
            block_counts[: len(counts)] += counts
            counts = block_counts
    return counts


def unigram_entropy(path: str | Path) -> float:
    """Entropy of the distribution of single tokens, -sum p ln p, in nats a token.

    It is the loss of the best model that ignores context. Raises DataError if there are no tokens.
    """
    counts = token_counts(path)
    if counts.sum() == 0:
        raise DataError(str(path), "holds no tokens", "Prepare some text first.")
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


MARK = ".ultrascale-demo"
MADE_AFRESH = ("run", "plots", "exported", "run.toml", "training.log", "summary.json")
"""Files of an earlier demo that are created again; the prepared text is kept."""


@contextmanager
def demo_folder(folder: Path) -> Iterator[None]:
    """Create and lock `folder`. Raises SpecError if it has other content, is in use, or cannot be written."""
    try:
        if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).exists():
            raise mistake("--folder", f"{folder} holds other files, which the demo must not mix with", "Name another.")
        folder.mkdir(parents=True, exist_ok=True)
        mark = open(folder / MARK, "w")  # noqa: SIM115 (closed below: the lock lives as long as the file is open)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise mistake("--folder", f"{folder} cannot be written: {reason}", "Name another.") from None
    with mark:
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise mistake("--folder", f"another demo is using {folder}", "Wait for it, or name another.") from None
        _clear(folder)
        yield


def forget_text(folder: Path) -> None:
    """Remove the prepared text, if the library it was made from has changed."""
    shutil.rmtree(folder / "data", ignore_errors=True)


def _clear(folder: Path) -> None:
    for name in MADE_AFRESH:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


HEIGHT = 9
BLOCKS = " ▁▂▃▄▅▆▇█"


def loss_curve(losses: Sequence[float], *, width: int, marks: Sequence[tuple[int, str]]) -> str:
    """A text curve of `losses` by step, at most `width` columns wide, with a line below that names the step of each mark.

    Each column is the mean of its steps; the axis starts at the lowest loss, so that the drop is visible.
    """
    columns = min(width, len(losses))
    edges = [len(losses) * column // columns for column in range(columns + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    levels = [round((value - low) / ((high - low) or 1) * (HEIGHT * 8 - 1)) + 1 for value in means]
    rows = []
    for row in range(HEIGHT, 0, -1):
        cells = "".join(BLOCKS[max(0, min(8, level - 8 * (row - 1)))] for level in levels)
        name = f"{high:6.2f} " if row == HEIGHT else f"{low:6.2f} " if row == 1 else " " * 7
        rows.append((name + cells).rstrip())
    for step, text in marks:
        column = min(columns - 1, max(0, (step - 1) * columns // len(losses)))
        rows.append(f"{' ' * (7 + column)}^ step {step}: {text}")
    return "\n".join(rows)


PROCESSES = 2
TRAINING_SECONDS = 50
"""Seconds of training at the rehearsed rate. Work that the rate excludes (half as much again) and the restart after the kill
are additional, and a busy machine takes up to three times as long: the total is to stay below five minutes."""
STEPS = (160, 640)
"""Fewest and most steps: with fewer the loss drops too little, with more the demo takes too long."""
SAVES = 5
_TOML = """\
# A Llama of 4 million parameters on the sources of Python's standard library, on two processes of this machine.

name = "run"
folder = {folder}
steps = {steps}
device = "cpu"

[model]
preset = "tiny-llama-4m"
vocab_size = {vocabulary}
initializer_range = 0.05    # a narrow model learns sooner from larger weights than the usual 0.02

[layout]
dp = {processes}
zero_stage = 2
micro_batch_size = 4
precision = "{precision}"

[batch]
sequence_length = 256
sequences_per_batch = 8

[data]
sources = [{data}]
validation = [{validation}]

[optimizer]
learning_rate = 2e-3
warmup_steps = 30
min_learning_rate_ratio = 0.05

[checkpoint]
every_steps = {every}
export = false          # the demo does it in a stage of its own

[evaluation]
every_steps = {every}
sequences = 64
"""


def write_run(folder: Path, *, precision: Precision = "fp32", steps: int = STEPS[0]) -> Run:
    """Write `folder`/run.toml and read it back as `ultrascale train` does."""
    file, data = folder / "run.toml", folder / "data"
    quoted = {"folder": folder, "data": data, "validation": data / "validation"}
    file.write_text(
        _TOML.format(
            steps=steps, precision=precision, every=steps // SAVES, processes=PROCESSES, vocabulary=VOCABULARY,
            **{key: json.dumps(str(path), ensure_ascii=False) for key, path in quoted.items()},
        )
    )  # fmt: skip
    return resolve(file).run


def fitting_steps(seconds_per_step: float) -> int:
    """Steps that take about TRAINING_SECONDS, a multiple of SAVES."""
    fewest, most = STEPS
    return round(min(most, max(fewest, TRAINING_SECONDS / seconds_per_step)) / SAVES) * SAVES
