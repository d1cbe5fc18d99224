"""The other workers that train in step with this one: `watched` meets and watches them, where there are any."""

import threading
from collections.abc import Callable

from looplib.cluster.environment import Cluster


class Peers:
    """The other workers of a run that train in step with this one. This base class has none; `WatchedPeers` does.

    Attributes:
      joined: whether there are others, and this process has met them.
    """

    joined: bool = False

    def wait_for_thread(self, save: threading.Thread) -> None:
        """Lets an exit for the failure of another worker wait until a save is written, for up to 20 seconds.

        The thread must need no other worker.
        """

    def report_exit_by(self, end: Callable[[str, str], None]) -> None:
        """Lets an exit for the failure of another worker write how the run ended: its status, and a sentence."""

    def exit_with_first_cause(self, seconds: float) -> None:
        """Waits some seconds for the news that another worker failed first; if so, exits here with that cause.

        A frozen worker, or one that is cut off, is known after a limit of silence.
        """

    def announce_exit(self, code: int, sentence: str) -> None:
        """Tells the others that this process ends; they exit with its code, and a line that says so.

        Returns once the chief has noted it. If the chief has another cause already, this process exits with that one.
        """

    def leave(self, seconds: float | None = None) -> None:
        """Says goodbye, and waits until all have, or for some seconds; a failure until then ends this process."""


current = Peers()  # the run's own, alone until `join` has met others


def join(cluster: Cluster, join_limit: float) -> None:
    """Connects to the other workers of a cluster within some seconds, and begins to watch them."""
    global current
    if len(cluster.workers) > 1:
        from looplib.cluster.watched import WatchedPeers  # here, as it is one of the `Peers`

        current = WatchedPeers(cluster, join_limit)
