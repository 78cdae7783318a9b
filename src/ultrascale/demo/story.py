"""The story, stage by stage. Each stage prints the command that does the same, and ends in claims.

text  ->  plan  ->  prove  ->  train, kill, resume  ->  planned beside measured  ->  loss  ->  sample  ->  export  ->  plots
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from rich.text import Text

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.data.errors import DataError
from ultrascale.data.preparing.entropy import unigram_entropy
from ultrascale.data.preparing.prepare import Prepared, Progress
from ultrascale.demo.claims import Claim, judged
from ultrascale.demo.folder import demo_folder, forget_text
from ultrascale.demo.picture import loss_curve
from ultrascale.demo.recipe import PROCESSES, SAVES, fitting_steps, write_run
from ultrascale.demo.screen import INDENT, Screen
from ultrascale.demo.stages.exported import compare_with_transformers, export_newest
from ultrascale.demo.stages.interrupted import train_and_kill
from ultrascale.demo.stages.proof import plant_faults, prove_layouts
from ultrascale.demo.stages.rehearsal import rehearse, step_seconds
from ultrascale.demo.stages.sample import PROMPTS, continue_prompts, sample_words
from ultrascale.demo.stages.text import library_folder, prepare_library, prepare_words
from ultrascale.description.run import Run
from ultrascale.description.units import format_bytes, format_count, format_flops_per_second, format_seconds
from ultrascale.measure.compare import Difference, comparison_table
from ultrascale.measure.plots import plot_run, read_metrics
from ultrascale.measure.run_marks import marks_of
from ultrascale.plan.report import plan_run
from ultrascale.plan.view.plan_view import show_plan

MEMORY_PERCENT = 3.0
"""Largest difference between the planned and the measured peak."""
STEP_PERCENT = 10.0
"""Largest difference between the planned and the measured time of a step. A machine that does other work too misses it, which
the table then says; no reason to fail."""
WELL_BELOW_NATS = 1.0
"""Least fall of the loss below the unigram entropy: the next token is e times as likely on (geometric) average."""
PICTURE_WIDTH = 72
"""Columns of the loss curve."""
LATE_STEPS = 8
"""Steps after a checkpoint that are lost to the kill."""


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

    def claim(self, claim: Claim) -> None:
        """Add to the closing table."""
        self.claims.append(claim)


def tell(folder: Path, screen: Screen) -> Demo:
    """The whole demo into `folder`. Raises DemoError if it cannot go on."""
    library = library_folder()
    with demo_folder(folder):
        demo = Demo(folder, screen)
        screen.say("[dim]No GPU, no network: a language model from text to export, on two processes of this machine.[/]")
        with screen.stage("Text: Python's own standard library"):
            entropy = _text(demo, library)
        with screen.stage("Plan: what it will take, before it runs"):
            run, planned = _plan(demo)
        with screen.stage("Prove: two processes compute what one does"):
            _prove(demo, run)
        with screen.stage("Train, with one process killed on the way"):
            _train(demo, run)
        rows = read_metrics(demo.run_folder / "metrics.jsonl")
        memory = json.loads((demo.run_folder / "memory.json").read_text())
        with screen.stage("Compare: planned beside measured"):
            _compare(demo, planned, rows, memory)
        with screen.stage("Loss: against a model that ignores context"):
            _loss(demo, rows, entropy)
        with screen.stage("Sample: what it writes"):
            _sample(demo)
        with screen.stage("Export: the model as transformers reads it"):
            _export(demo, run)
        with screen.stage("Plots"):
            _plots(demo, rows, memory, entropy)
        _close(demo)
    return demo


def _text(demo: Demo, library: Path) -> float:
    """Prepare the text. Returns the entropy of the held-out part's tokens, in nats."""
    data, screen = demo.folder / "data", demo.screen
    screen.command(*prepare_words(library, data))
    try:
        made = _prepare(demo, library, data)
    except DataError:  # prepared by an earlier demo from another Python, or cut short in a way that cannot go on
        forget_text(demo.folder)
        made = _prepare(demo, library, data)
    assert made.validation is not None
    entropy = unigram_entropy(data / "validation")
    screen.say(
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
    """Rehearse, settle precision and length of the run, and plan it; the run, and the seconds that a step should take."""
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
    screen.say(f"\nRehearsed here, a process reaches {rates}: so {precision}.")
    screen.say(
        f"A step of {format_count(run.batch.sequences_per_batch * run.batch.sequence_length)} tokens should take [bold]"
        f"{format_seconds(seconds)}[/], and {run.steps} of them fit the time that the demo has."
    )
    return run, seconds


def _prove(demo: Demo, run: Run) -> None:
    screen = demo.screen
    for flags, prove in (([], prove_layouts), (["--own-layout", "--plant", "all"], plant_faults)):
        screen.command("check", str(demo.run_file), *flags)
        claim = prove(run)
        demo.claim(claim)
        screen.say(f"{claim.number}.")
        for fault, parameter in claim.facts.get("seen", {}).items():
            screen.say(f"[dim]  {fault:<15} {f'seen in the gradient of {parameter}' if parameter else 'MISSED'}[/]")


def _train(demo: Demo, run: Run) -> None:
    screen, log = demo.screen, demo.folder / "training.log"
    every = run.steps // SAVES
    screen.command("train", str(demo.run_file), "--processes", str(PROCESSES))
    screen.say(f"[dim]What it says goes to {log}. After step {2 * every + LATE_STEPS} one process gets SIGKILL.[/]")
    with screen.bar("training", run.steps) as advance:
        cut = train_and_kill(
            demo.run_file, demo.run_folder, processes=PROCESSES, kill_at=2 * every + LATE_STEPS, log=log,
            watch=lambda rows: advance(*_progress(rows, run)),
        )  # fmt: skip
    equal = "all with the losses of before, to the last bit" if cut.same_losses else "with other losses than before"
    screen.say(
        f"Process {cut.killed_pid} was killed after step {cut.steps_before}. The run went on by itself from the checkpoint of "
        f"step {cut.resumed_at}: back at work after {cut.recovery_seconds:.1f} s, {cut.steps_redone} steps redone, {equal}."
    )
    demo.claim(
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
    table = comparison_table([Difference(**row) for row in memory["by_category"]])
    screen.say("[dim]Live bytes of rank 0's tensors, counted over the first four steps; differences in percent of the peak.[/]")
    screen.show(table)
    percent = memory["difference_percent"]
    demo.claim(
        judged(
            "peak memory is as planned",
            f"{format_bytes(memory['planned_peak_bytes'])} planned, {format_bytes(memory['measured_peak_bytes'])} measured: "
            f"{_signed(percent, 1)} %",
            abs(percent) <= MEMORY_PERCENT,
            planned_bytes=memory["planned_peak_bytes"], measured_bytes=memory["measured_peak_bytes"], percent=percent,
        )
    )  # fmt: skip
    measured = median(row["perf/step_s"] for row in rows if row.get("perf/step_s"))
    off = _signed(100 * (planned / measured - 1), 0)
    number = f"{format_seconds(planned)} planned, {format_seconds(measured)} measured: {off} %"
    screen.say(f"\nA step: {number}. [dim]Not in the plan: {_NOT_PLANNED}.[/]")
    facts = {"planned_seconds": planned, "measured_seconds": measured}
    verdict = "holds" if abs(planned / measured - 1) <= STEP_PERCENT / 100 else "missed"
    demo.claim(Claim("a step takes as long as planned", number, verdict, facts))


_NOT_PLANNED = "communication, the optimizer, and other work on this machine"


def _loss(demo: Demo, rows: list[dict[str, Any]], entropy: float) -> None:
    held_out = next(row["val/loss"] for row in reversed(rows) if "val/loss" in row)
    marks = [(mark.step, mark.text) for mark in marks_of(demo.run_folder)]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    width = min(PICTURE_WIDTH, demo.screen.console.width - 2 * INDENT - 8)
    demo.screen.show(Text(loss_curve(losses, width=width, marks=marks)))
    demo.screen.say(
        f"Knowing only how often each token occurs costs [bold]{entropy:.2f}[/] nats a token of the held-out text (its unigram "
        f"entropy).\nThe model, which has never seen that text, needs [bold]{held_out:.2f}[/]; it began at "
        f"{rows[0]['train/loss']:.2f}."
    )
    demo.claim(
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
        demo.claim(claim)
        screen.say(f"{claim.text[0].upper()}{claim.text[1:]}: {claim.number}.")


def _plots(demo: Demo, rows: list[dict[str, Any]], memory: dict[str, Any], entropy: float) -> None:
    text = "loss, memory and speed as pictures"
    if find_spec("matplotlib") is None:
        demo.claim(Claim(text, "matplotlib is not installed: pip install matplotlib", "skipped"))
        demo.screen.say("Skipped: matplotlib is not installed (pip install matplotlib).")
        return
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it announces that it looks for fonts
    written = plot_run(
        rows, demo.folder / "plots", memory_timeline=memory["measured_timeline"],
        planned_peak_bytes=memory["planned_peak_bytes"], reference_loss=("unigram entropy", entropy),
        marks=marks_of(demo.run_folder),
    )  # fmt: skip
    for path in written:
        demo.screen.say(str(path))
    good = len(written) == 3 and all(path.stat().st_size > 0 for path in written)
    demo.claim(judged(text, f"{len(written)} PNGs in {demo.folder / 'plots'}", good, files=[str(path) for path in written]))


def _close(demo: Demo) -> None:
    """The claims, and what to do next."""
    seconds, screen = time.perf_counter() - demo.started, demo.screen
    screen.console.print("\n[bold]In short[/]")
    screen.claims(demo.claims)
    spent = "  ".join(f"{_first_word(title)} {stage.seconds:.0f}" for title, stage in screen.spent.items())
    cpu = sum(stage.cpu_seconds for stage in screen.spent.values())
    screen.say(f"\n[dim]{format_seconds(seconds)} in all, {format_seconds(cpu)} of CPU time. Seconds by stage: {spent}[/]\n")
    screen.say(f"Everything is in [bold]{demo.folder}[/]. To look around:")
    screen.command("show", str(demo.run_file))
    screen.command("report", str(demo.run_folder))
    screen.command("checkpoint", "list", str(demo.run_folder))
    screen.command("generate", str(demo.run_folder), "--prompt", "import ")
    screen.say("\nNext, your own text: a folder of files, and the same run on it.")
    mine = str(demo.folder / "mine")
    screen.command(
        "data", "prepare", "YOUR_FOLDER", "--train-tokenizer", "4096", "--validation-fraction", "0.05", "--output", mine
    )
    own = ("--data.sources", mine, "--data.validation", f"{mine}/validation", "--name", "mine")
    screen.command("train", str(demo.run_file), *own)
    summary = {
        "seconds": seconds,
        "stages": {title: asdict(stage) for title, stage in screen.spent.items()},
        "claims": [claim.to_json() for claim in demo.claims],
    }
    (demo.folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def _signed(value: float, decimals: int) -> str:
    """`+3.1`, `-0.2`, and plain `0.0` for what rounds to nothing."""
    rounded = round(value, decimals)
    return f"{rounded:+.{decimals}f}" if rounded else f"{0:.{decimals}f}"


def _first_word(title: str) -> str:
    return title.partition(":")[0].partition(",")[0].lower()
