"""`RunConfig`: the settings of a controller, each declared once with its default, check, text and flag."""

import dataclasses
import datetime
import functools
import re
from typing import Any

from looplib.base.messages import duration, shown, whole_number
from looplib.config import settings
from looplib.config.settings import setting
from looplib.errors import FlagError, SettingError

_HIGHEST_PORT = 65_535
ENGINES = ("auto", "graph", "xla", "eager")


def _read_bad_records(text: str | None) -> int:
    """Parses --bad_records; returns the number of damaged records that a run may skip."""
    if not text:
        return 0
    if not (found := re.fullmatch(r"skip:(\d{1,9})", text)):
        raise FlagError(f"--bad_records is {text!r}; expected skip:N, such as skip:10")
    return int(found[1])


def _data_service(name: str, text: Any) -> str | None:
    """Checks addresses of data workers; returns them, or None for ""."""
    for address in text.split(",") if text and isinstance(text, str) else () if text == "" else (text,):
        found = re.fullmatch(r"(\[[0-9A-Fa-f:]+\]|[\w.-]+):(\d{1,5})", address) if isinstance(address, str) else None
        if not found or not 0 < int(found[2]) <= _HIGHEST_PORT:
            raise SettingError(
                f"{name} has {shown(address)}; expected HOST:PORT of each data worker, with commas between them, such "
                "as 10.0.0.5:5050"
            )
    return text or None


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The settings of a controller, which its loops and data pipelines receive unchanged.

    A binary has a flag for each; see `looplib.launch.run`.

    Attributes:
      global_batch_size: examples of a training step over all replicas; also for evaluators that set no size of their
        own. Required, except for `OrbitTrainer` and `OrbitEvaluator`, which bring their own data.
      steps_per_loop: steps of one call into the device; training metrics are reported at its exact multiples. Default
        100, or an epoch for a `KerasTrainer`.
      loop: the engine: "graph"; "xla", chunks of steps as one program of XLA; "auto", the fastest of these for the
        model, found in the first loops; "eager", for debugging.
      seed: seed of the order of the training data; `looplib.runtime.setup` seeds everything else.
      max_time: seconds, a `datetime.timedelta` or text such as "1h30m"; kept as seconds. After this time a call of
        `train` ends as by a signal: after the current step, with a save, by `Preempted`. A binary's time counts from
        its own start.
      overfit_batch: trains on the first batch of the data in each step, to see whether the model can fit it.
      bad_records: maximum number of damaged records of `context.records` that the run skips; one more ends it. Without
        a run directory, each worker counts its own records.
      distribute: how batches reach the replicas. "auto" uses one plain iterator per process on CPUs and GPUs; "tf" uses
        the iterators of tf.distribute everywhere.
      data_service: HOST:PORT of each data worker, with commas between them: these make the batches of the training.
        Evaluations read their data themselves.

    Raises:
      UsageError: for bad input, in a sentence.
    """

    global_batch_size: int | None = setting(None, "Examples of one step over all replicas.", least=1, flag_default=64)
    steps_per_loop: int | None = setting(
        None, "Steps per call to the device, and per report.", least=1, flag_default=100
    )
    loop: str = setting("graph", "Loop engine; auto selects the fastest; eager is for debugging.", choices=ENGINES)
    seed: int = setting(
        0, "Seeds initial weights, data order and everything else.", check=functools.partial(whole_number, least=0)
    )
    max_time: float | str | datetime.timedelta | None = setting(
        None,
        "Saves and ends with code 75 after this time: 90 (seconds), 45m, 1h30m.",
        check=duration,
        read=lambda text: text or None,
    )
    overfit_batch: bool = setting(False, "Trains on the first batch of the data in each step.")
    bad_records: int = setting(
        0,
        "skip:N leaves out up to N damaged records in a run; none: an error.",
        least=0,
        flag_default=None,
        read=_read_bad_records,
    )
    distribute: str = setting("auto", "What hands out batches; tf: tf.distribute's iterators.", choices=("auto", "tf"))

    data_service: str | None = setting(
        None, "HOST:PORT of data workers, with commas, that make the batches of the training.", check=_data_service
    )

    def __post_init__(self) -> None:
        settings.check(self)

    @property
    def data_workers(self) -> tuple[str, ...]:
        """The addresses of the data workers."""
        return tuple(self.data_service.split(",")) if self.data_service else ()

    @property
    def recorded(self) -> dict[str, int | str | None]:
        """The settings that influence the results, by the names of their fields in the run record."""
        return {"seed": self.seed, "global_batch_size": self.global_batch_size, "loop": self.loop}
