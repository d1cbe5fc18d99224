"""A run as the page shows it."""

import dataclasses

from looplib.report.page.curves import Curve
from looplib.report.page.samples import Samples
from looplib.run.phases import TimeSpan
from looplib.run.slow_workers import Straggler
from looplib.run.standing import Standing


@dataclasses.dataclass(frozen=True)
class Change:
    """A setting with two values, as texts: of the start before and of this one, or the default and the run's own."""

    name: str
    before: str
    now: str


@dataclasses.dataclass(frozen=True)
class ShownStart:
    """One start of the run; see `RunReport` for its fields. `trained` is False if there was nothing left to train."""

    started: str
    status: str
    step: int | None
    restored_step: int | None
    trained: bool
    command: str
    commit: str
    seconds: dict[str, float]
    verdict: str
    error: str
    note: str
    changed: list[Change]
    rollbacks: list["Mark"]
    warnings: list["ShownWarning"]


@dataclasses.dataclass(frozen=True)
class Mark:
    """What happened at a step: a "restart", "rollback", "warning", "phase", "skipped" steps, the "best" checkpoint."""

    kind: str
    step: int
    text: str


@dataclasses.dataclass(frozen=True)
class ShownWarning:
    """What `LearningWarnings` has found at a step; see `meaning.finding.LearningFinding`."""

    kind: str
    step: int
    text: str
    advice: str


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint, when it was saved (seconds since the epoch), and why it cannot be used, if so."""

    step: int
    time: float | None
    bytes: int | None
    scores: dict[str, float]
    best: bool
    trouble: str


@dataclasses.dataclass(frozen=True)
class Variable:
    """A row of the model's table."""

    name: str
    shape: str
    parameters: int | None
    trainable: bool


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory, as the page shows it.

    Attributes:
      name: of the directory, below the one that the page is for.
      status: see `RunStatus.state`; what `run.json` says of a remote run; "" if that is not known.
      step: the last known step, or None.
      final_step: the step of an earlier checkpoint that was restored after the training, or None.
      error: the sentence of a failure.
      seconds: dict from phase to seconds, over all starts, without the sum.
      wall: the sum.
      best_metric: the metric by which a checkpoint is the best, such as "eval/accuracy"; "" for none.
      best_mode: "max" or "min".
      settings: dict from the name of each setting to its text.
      changed: the settings that differ from their defaults, with these; None where the defaults are not known.
      totals: counts of the model, such as "parameters".
      speed: the numbers of a `Speed`, and `dtype` its type.
      traceback: where the error of a failed run was raised.
      spans: where the time went, step by step.
      life: seconds since the first start by cause, see `goodput.Goodput`; {} for a run of one start without rollbacks.
      stragglers: the workers that were slower than the others at the end of the newest start, the slowest first.
      copy: how far the copy in an object store is; None without one.
      notes: what could not be read, in sentences.
    """

    name: str
    directory: str
    status: str = "unknown"
    step: int | None = None
    final_step: int | None = None
    started: str = ""
    error: str = ""
    verdict: str = ""
    strategy: str = ""
    rollbacks: int = 0
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    wall: float = 0.0
    best_metric: str = ""
    best_mode: str = ""
    starts: list[ShownStart] = dataclasses.field(default_factory=list)
    marks: list[Mark] = dataclasses.field(default_factory=list)
    curves: list[Curve] = dataclasses.field(default_factory=list)
    checkpoints: list[SavedCheckpoint] = dataclasses.field(default_factory=list)
    model: list[Variable] = dataclasses.field(default_factory=list)
    totals: dict[str, float] = dataclasses.field(default_factory=dict)
    speed: dict[str, float] = dataclasses.field(default_factory=dict)
    dtype: str = ""
    traceback: str = ""
    spans: list[TimeSpan] = dataclasses.field(default_factory=list)
    life: dict[str, float] = dataclasses.field(default_factory=dict)
    stragglers: list[Straggler] = dataclasses.field(default_factory=list)
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    changed: list[Change] | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    program: dict[str, str] = dataclasses.field(default_factory=dict)
    diff: str = ""
    samples: Samples = Samples([], [], [], 0)
    copy: Standing | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    def curve(self, metric: str) -> Curve | None:
        """Returns the curve of "<split>/<name>", or None."""
        return next((one for one in self.curves if f"{one.split}/{one.name}" == metric and not one.undone), None)
