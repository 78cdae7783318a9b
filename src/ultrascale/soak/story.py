"""A run under faults for a while, an undisturbed run, and the test that both end alike to the bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ultrascale.check.oracle.messages import same_bits
from ultrascale.checkpoint import load_full, newest_valid
from ultrascale.config.resolve import to_toml
from ultrascale.config.rules.time_limits import GRACE_SECONDS, TORCHRUN_GRACE
from ultrascale.data.indexed import ShardWriter
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.problems import mistake
from ultrascale.description.run import Batch, Checkpoint, Data, Faults, Log, Optimizer, Run, Source
from ultrascale.launch.events import read_rows
from ultrascale.launch.orphans import terminate_with_parent
from ultrascale.launch.restarts import RestartAccount, read_account
from ultrascale.soak.launcher import WITHOUT_END
from ultrascale.soak.storm import KINDS, Planted, draw, fired, healed, write
from ultrascale.train.folder.run_folder import RunFolder

MODEL = Model(
    vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    head_dim=16, max_position_embeddings=64, name="soak",
)  # fmt: skip
INTERVAL = 10
"""Steps between checkpoints."""
MEAN_GAP = 12.0
"""Mean number of steps between two faults."""
ENDLESS = 1_000_000
POLL_SECONDS = 0.1
HANG_SECONDS = 4.0
DIGEST_STEPS = 5
STOP_SECONDS = 180.0
IDLE_SECONDS = 180.0
"""Seconds after which a last fault that the run has not noticed counts as without effect."""
MARK = ".soak"
WITHOUT_EFFECT = "nobody: without effect"


class SoakError(RuntimeError):
    """The storm could not be completed."""


@dataclass(frozen=True)
class Strike:
    """A fault that struck, and its outcome."""

    fault: Planted
    time: float
    detected_by: str
    detect_seconds: float | None
    recover_seconds: float | None
    """Seconds to the end of the next step."""
    steps_lost: int
    had_effect: bool = True
    """False: the run continued to the next fault unaffected, and there was nothing to survive."""

    @property
    def is_survived(self) -> bool:
        """True if it had an effect, and the run recovered from it."""
        return self.had_effect and self.recover_seconds is not None


@dataclass(frozen=True)
class StormOutcome:
    """Results of a storm and of the undisturbed run."""

    strikes: list[Strike]
    steps: int
    equal_losses: bool
    equal_state: bool
    account: RestartAccount
    seconds: float

    @property
    def holds(self) -> bool:
        """True if every fault that had an effect was survived, and nothing differs."""
        return self.equal_losses and self.equal_state and all(hit.is_survived or not hit.had_effect for hit in self.strikes)


def soak(
    folder: Path,
    *,
    processes: int,
    seed: int = 0,
    kinds: Sequence[str] = tuple(KINDS),
    seconds: float | None = None,
    num_faults: int | None = None,
    mean_gap: float = MEAN_GAP,
    hang_seconds: float = HANG_SECONDS,
    torchrun: bool = False,
    say: Callable[[str], None] = print,
) -> StormOutcome:
    """Inject faults for `seconds`, or until `num_faults` have struck; then do as many steps without faults, and compare.
    `hang_seconds`: of the run; stalls that are shorter, and slowness that lasts longer, are scaled by it. `torchrun` starts and
    restarts the ranks under faults; those of the undisturbed run are started by `ultrascale train`.

    Raises SpecError for unknown kinds or a folder with other content, and SoakError if the run does not recover.
    """
    faults = list(islice(draw(seed, kinds, world=processes, mean_gap=mean_gap, interval=INTERVAL), num_faults or 10_000))
    make_folder(folder)
    run = make_run(folder, processes, hang_seconds=hang_seconds)
    began = time.monotonic()
    steps = _Storm(folder, run, faults, say, torchrun).carry_through(None if seconds is None else began + seconds)
    took = time.monotonic() - began
    say(f"the storm is over after {steps} steps and {took:.0f} s; the same in the calm")
    calm = make_run(folder, processes, name="calm")
    _calm(folder, calm, steps)
    stormy = RunFolder.of(run)
    equal = _curve(run) == _curve(calm) and len(_curve(run)) == steps
    struck = fired(folder / "storm", faults)
    over = healed(folder / "storm", faults)
    strikes = strikes_of([(fault, struck[fault.number]) for fault in faults if fault.number in struck], _events(run), over)
    return StormOutcome(strikes, steps, equal, same_state(run, calm), read_account(stormy.path / "events.jsonl"), took)


def make_folder(folder: Path) -> None:
    """Create an empty folder; that of an earlier soak is emptied. Raises SpecError if it holds anything else."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARK).exists():
            raise mistake("--folder", f"{folder} holds other files", "Give a new folder.")
        subprocess.run(["rm", "-rf", "--", str(folder)], check=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


def make_run(folder: Path, processes: int, *, name: str = "stormy", hang_seconds: float = HANG_SECONDS) -> Run:
    """A run of a very small model on random tokens, with at least half of the ranks replicating each other's state."""
    tokens = folder / "tokens"
    if not Path(f"{tokens}.bin").exists():
        random = np.random.default_rng(0)
        lengths = random.integers(1, 80, 400).tolist()
        writer = ShardWriter(tokens, "uint16")
        writer.add_documents(random.integers(0, MODEL.vocab_size, sum(lengths)), lengths)
        writer.finish()
    shard = processes // 2
    layout = Layout(dp=processes, zero_stage=3 if shard > 1 else 0, dp_shard=shard if shard > 1 else None)
    return Run(
        model=MODEL, name=name, folder=str(folder), steps=ENDLESS, seed=5, device="cpu", collective_timeout_seconds=60.0,
        layout=layout, batch=Batch(sequence_length=32, sequences_per_batch=2 * processes),
        data=Data(sources=(Source(str(tokens)),)), 
        optimizer=Optimizer(learning_rate=3e-3, warmup_steps=20, schedule="constant"),
        checkpoint=Checkpoint(every_steps=INTERVAL, keep=3, export=False), log=Log(memory_steps=0),
        faults=Faults(hang_seconds=hang_seconds, on_anomaly="rewind", digest_every_steps=DIGEST_STEPS),
    )  # fmt: skip


@dataclass
class _Storm:
    folder: Path
    run: Run
    faults: list[Planted]
    say: Callable[[str], None]
    torchrun: bool
    announced: int = 0

    def carry_through(self, deadline: float | None) -> int:
        """Launch until the storm is over, and stop in order; returns the completed steps."""
        while True:
            before, process = len(self._struck()), self._launched(self.faults)
            over = self._watch(process, deadline)
            if over:
                self._stop(process)
                return _stopped_at(self.run)
            if len(self._struck()) == before:
                raise SoakError(
                    f"the command ended with {process.returncode} without a fault: see {self.folder / 'stormy.log'}"
                )

    def _watch(self, process: subprocess.Popen, deadline: float | None) -> bool:
        """Wait for the end of the storm (true) or of the process."""
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            struck = self._struck()
            for number in sorted(struck)[self.announced :]:
                fault = self.faults[number]
                self.say(f"fault {number}: {fault.kind} on rank {fault.rank} in step {fault.step} ({fault.moment})")
            self.announced = len(struck)
            late = deadline is not None and time.monotonic() > deadline
            if (late or len(struck) == len(self.faults)) and self._is_over(struck):
                return True
        return False

    def _is_over(self, struck: dict[int, float]) -> bool:
        """True if the run has recovered from the last fault, or never noticed it."""
        last = max(struck.values(), default=0.0)
        over = healed(self.folder / "storm", self.faults)
        is_healed = bool(struck) and max(struck, key=lambda number: struck[number]) in over
        return _is_back(self.run, last) or is_healed or time.time() > last + IDLE_SECONDS

    def _launched(self, faults: list[Planted]) -> subprocess.Popen:
        return _launched(self.folder, self.run, faults, torchrun=self.torchrun)

    def _struck(self) -> dict[int, float]:
        return fired(self.folder / "storm", self.faults)

    def _stop(self, process: subprocess.Popen) -> None:
        """Request the end; once more without faults, if one interfered."""
        process.send_signal(signal.SIGTERM)
        _wait(process)
        if _last_event(self.run) != "stop":
            relaunched = self._launched([])
            started = time.time()
            while relaunched.poll() is None and not _is_back(self.run, started):
                time.sleep(POLL_SECONDS)
            relaunched.send_signal(signal.SIGTERM)
            _wait(relaunched)


def _launched(
    folder: Path, run: Run, faults: list[Planted], *, stop_at: int | None = None, torchrun: bool = False
) -> subprocess.Popen:
    file = folder / f"{run.name}.toml"
    file.write_text(to_toml(run))
    storm = write(folder / ("storm" if stop_at is None else "calm-storm"), faults, stop_at=stop_at)
    environment = os.environ | {"ULTRASCALE_STORM": str(storm), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "ultrascale.soak.launcher", str(file)]
    if torchrun:
        world = ["--standalone", "--nproc-per-node", str(run.layout.world_size), "--max-restarts", str(WITHOUT_END)]
        words = [sys.executable, "-m", "torch.distributed.run", *world, "-m", "ultrascale.soak.worker", str(file)]
        environment |= {"GLOO_SOCKET_IFNAME": "lo", TORCHRUN_GRACE: f"{GRACE_SECONDS:.0f}"}
    with open(folder / f"{run.name}.log", "a") as log:
        return subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            preexec_fn=terminate_with_parent,
        )  # fmt: skip


def _calm(folder: Path, run: Run, steps: int) -> None:
    process = _launched(folder, run, [], stop_at=steps)
    try:
        process.wait()
    finally:
        process.terminate() if process.poll() is None else None
    if process.returncode or _stopped_at(run) != steps:
        raise SoakError(f"the calm run did not come to step {steps}: see {folder / 'calm.log'}")


def _wait(process: subprocess.Popen) -> None:
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise SoakError(f"the command did not stop within {STOP_SECONDS:.0f} s") from None


def strikes_of(
    struck: list[tuple[Planted, float]], events: list[dict[str, Any]], over: Mapping[int, float] | None = None
) -> list[Strike]:
    """Outcome of each fault that struck, from the events of a run. `over`: times at which faults without a restart ended, by
    number."""
    struck = sorted(struck, key=lambda pair: pair[1])
    ends = [when for _, when in struck[1:]] + [float("inf")] * bool(struck)
    strikes = []
    for (fault, when), end in zip(struck, ends, strict=True):
        after = [event for event in events if event["time"] >= when]
        gone = (over or {}).get(fault.number)
        failed = (e for e in after if e["event"] in ("failure", "rewind", "start") and e["time"] < (gone or 0.0))
        if gone is not None and not any(failed):
            strikes.append(_gone_over(fault, when, gone, after))
            continue
        answers = [e for e in after if e["event"] in ("failure", "stop", "rewind", "start") and e["time"] < end]
        if not answers and end < float("inf"):
            strikes.append(Strike(fault, when, WITHOUT_EFFECT, None, None, 0, had_effect=False))
            continue
        start = next((e for e in after if e["event"] in ("start", "rewind")), None)
        until = min(end, float("inf") if start is None else start["time"])
        failure = next((e for e in after if e["event"] in ("failure", "stop", "rewind") and e["time"] <= until), None)
        resumed = 0 if start is None else start.get("to", start["step"])
        stepped = next((e for e in after if e["event"] == "stepped"), None)
        strikes.append(
            Strike(
                fault, when, _detector(failure), None if failure is None else failure["time"] - when,
                None if stepped is None else stepped["time"] - when,
                0 if start is None else max(0, ((failure or {}).get("step") or fault.step) - resumed),
            )
        )  # fmt: skip
    return strikes


def _gone_over(fault: Planted, when: float, until: float, after: list[dict[str, Any]]) -> Strike:
    """A fault without a restart: either reported by the run, or handled silently."""
    words = {"save failed": KINDS[fault.kind].met_by, "straggler": "the comparison of ranks"}
    noticed = next(
        (e for e in after if e["event"] in words and e["time"] <= until and e.get("rank", fault.rank) == fault.rank), None
    )
    by, seconds = (KINDS[fault.kind].met_by, None) if noticed is None else (words[noticed["event"]], noticed["time"] - when)
    return Strike(fault, when, by, seconds, until - when, 0)


def _detector(failure: dict[str, Any] | None) -> str:
    if failure is None:
        return "the command given again"
    if failure["event"] == "rewind":
        return "digests" if "bits" in failure["cause"] else "the norm of the gradient"
    if failure["event"] == "stop":
        return "an orderly stop"
    cause = failure["cause"]
    for start, who in (("hang", "watchdog"), ("the ranks do not agree", "record of collectives")):
        if cause.startswith(start):
            return who
    return "agent"


def _curve(run: Run) -> list[tuple[Any, ...]]:
    keys = ("step", "train/loss", "train/grad_norm", "train/lr")
    return [tuple(row[key] for key in keys) for row in RunFolder.of(run).metric_rows()]


def same_state(first: Run, second: Run) -> bool:
    """True if the newest checkpoints of two runs have the same bits: weights and moments."""
    checkpoints = [newest_valid(RunFolder.of(run).checkpoints) for run in (first, second)]
    assert checkpoints[0] is not None and checkpoints[1] is not None
    left, right = (load_full(folder)[0] for folder in checkpoints if folder is not None)
    return left.keys() == right.keys() and all(same_bits(left[name], right[name]) for name in left)


def _events(run: Run) -> list[dict[str, Any]]:
    return [row for row in read_rows(RunFolder.of(run).path / "events.jsonl") if isinstance(row, dict)]


def _last_event(run: Run) -> str:
    events = _events(run)
    return events[-1]["event"] if events else ""


def _is_back(run: Run, since: float) -> bool:
    """True if a step has been completed since then, after a start."""
    last = next((event for event in reversed(_events(run)) if event["event"] in ("stepped", "start", "failure")), None)
    if last is None or last["event"] != "stepped":
        return False
    return last["time"] > since


def _stopped_at(run: Run) -> int:
    stops = [event for event in _events(run) if event["event"] == "stop"]
    if not stops:
        raise SoakError(f"{run.name} did not stop in order: see {Path(run.folder) / f'{run.name}.log'}")
    return stops[-1]["step"]
