"""How far the copy of a run in an object store is: written beside the local directory, for `status` and the page."""

import contextlib
import dataclasses
import json
import os
import time

from looplib.base import files

_STATUS, _MOST_BYTES = "status.json", 1 << 16
_LATE = 120.0  # seconds without a complete copy that are mentioned although no checkpoint waits


@dataclasses.dataclass
class Standing:
    """How far the copy of a run is.

    Attributes:
      url: the run directory in the store, without secrets.
      step: the step of the newest checkpoint there; -1 for none.
      behind: checkpoints that are not there yet.
      complete: when the copy was last complete, in seconds since the epoch.
      requests: requests of this start to the store.
      error: why the copy is behind; "" while it is not.
    """

    url: str
    step: int = -1
    behind: int = 0
    complete: float = 0.0
    requests: int = 0
    error: str = ""

    @property
    def is_behind(self) -> bool:
        """Whether checkpoints wait to be copied, or the store has not answered for long."""
        return self.behind > 0 or bool(self.error and time.time() - self.complete > _LATE)

    @property
    def text(self) -> str:
        """A clause such as "2 checkpoints are not in s3://bucket/run yet, which has step 40"."""
        has = f"has step {self.step:,}" if self.step >= 0 else "has no checkpoint"
        if not self.is_behind:
            return f"{self.url} {has}"
        number = "1 checkpoint is" if self.behind == 1 else f"{self.behind:,} checkpoints are"
        late = f"{number} not in {self.url} yet" if self.behind else f"{self.url} is not up to date"
        return f"{late}, which {has}" + (f": {self.error}" if self.error else "")

    def write(self, place: str) -> None:
        """Writes it into the folder beside the local directory, if that is possible."""
        with contextlib.suppress(OSError):
            content = json.dumps(dataclasses.asdict(self))
            files.write_whole(os.path.join(place, _STATUS), content, durable=False)


def standing_of(directory: str) -> Standing | None:
    """Returns how far the copy of a run is that trains or has trained on this machine; None for a run without one."""
    path = os.path.join(f"{directory.rstrip(os.sep)}.mirror", _STATUS)
    with contextlib.suppress(OSError, ValueError):
        return files.typed(files.parse_json(files.read_text(path, _MOST_BYTES)), Standing)
    return None
