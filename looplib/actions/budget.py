"""Budget: keeps what all checks of a run take below a share of its time."""

import contextlib
import time
from collections.abc import Iterator


class Budget:
    """Keeps what checks take below a share of the time since the training began.

    Args:
      share: such as 0.004, for 0.4%.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.seconds = 0.0  # that checks have taken since the training began
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Counts the time from here on."""
        self.seconds, self._began = 0.0, time.perf_counter()

    def allows(self, seconds: float) -> bool:
        """Returns whether a check that takes about so many seconds fits."""
        return self.seconds + seconds <= self.share * (time.perf_counter() - self._began)

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Counts the time of the `with` block as that of checks."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began
