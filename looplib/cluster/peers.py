"""The other workers that train in step with this one: they meet, watch each other, and end together."""

import collections
import dataclasses
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

from looplib.base import console
from looplib.cluster import rendezvous
from looplib.cluster.environment import Cluster
from looplib.errors import EXIT_FAILED, EXIT_PREEMPTED


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
        current = WatchedPeers(cluster, join_limit)


_DRAIN = 2.0  # seconds that the last messages have to arrive
_SAVE = 20.0  # seconds that a save under way has to end; all processes have to exit within a minute of the failure
_NOTE = 5.0  # seconds that the report of the run has to be written
_AGAIN = "run the same command on all workers to resume from the newest checkpoint"


@dataclasses.dataclass(frozen=True)
class _Cause:
    """Why all workers of a run exit."""

    index: int  # of the worker that failed or was preempted
    code: int  # the exit code of all
    what: str  # what happened to that worker: the predicate of a sentence

    def as_message(self) -> dict[str, dict[str, int | str]]:
        return {"cause": dataclasses.asdict(self)}


class WatchedPeers(Peers):
    """The other workers of a run, which this one has met and watches.

    Example:
      peers = WatchedPeers(cluster)  # before TensorFlow's strategy is made
      try:
          train()
      except Exception as error:
          peers.exit_with_first_cause(seconds=5)  # does not return if another worker failed first
          peers.announce_exit(1, f"{type(error).__name__}: {error}")
          raise
      peers.leave()

    Attributes:
      cluster: the `Cluster`.
      silence_limit: seconds of silence after which a worker counts as lost.
    """

    joined = True

    def __init__(self, cluster: Cluster, join_limit: float = 60.0, *, silence_limit: float = 20.0) -> None:
        """Meets the others, who have to come within `join_limit` seconds; see `rendezvous.meet`."""
        if cluster.index is None:
            raise ValueError(f"the {cluster.task_type} of a cluster does not train in step with workers")
        self.cluster = cluster
        self.silence_limit = silence_limit
        self._beat = min(1.0, silence_limit / 5)
        self._ending = ""  # how this process ends: "last words" or "goodbye"
        self._done = threading.Event()  # the others have noted it, or none is left
        self._named = threading.Event()  # another worker has failed, and this process is about to exit
        self._save: threading.Thread | None = None
        self._note: Callable[[str, str], None] = lambda status, sentence: None
        self._orders: collections.deque[Callable[[], None]] = collections.deque()  # for the thread to call
        self._links = rendezvous.meet(cluster, join_limit, silence_limit)
        self._ear, self._mouth = socket.socketpair()
        os.register_at_fork(after_in_child=self._close)  # a child's copy would keep the connections of the dead open
        self._thread = threading.Thread(target=self._watch, name="looplib-peers", daemon=True)
        self._thread.start()

    def wait_for_thread(self, save: threading.Thread) -> None:
        """See `Peers`."""
        self._save = save

    def report_exit_by(self, end: Callable[[str, str], None]) -> None:
        """See `Peers`."""
        self._note = end

    def exit_with_first_cause(self, seconds: float) -> None:
        """See `Peers`; silence is noticed after `silence_limit`."""
        self._thread.join(seconds)  # it ends when no other worker is left
        if self._named.is_set():
            self._thread.join()  # it ends the process

    def announce_exit(self, code: int, sentence: str) -> None:
        """See `Peers`."""
        if self._begin("last words"):
            what = f"was preempted: {sentence}" if code == EXIT_PREEMPTED else f"failed: {sentence}"
            self._order(lambda: self._report(_Cause(self.cluster.index, code, what)))
            self._done.wait(2 * _DRAIN)
        self.exit_with_first_cause(0)

    def leave(self, seconds: float | None = None) -> None:
        """See `Peers`; waits for `silence_limit` if no seconds are given."""
        if self._begin("goodbye"):
            self._order(self._say_goodbye)
            self._done.wait(self.silence_limit if seconds is None else seconds)
            self.exit_with_first_cause(0)
            self._order(self._stop)
            self._thread.join(2 * _DRAIN)

    def _begin(self, ending: str) -> bool:
        if self._ending:
            return False
        self._ending = ending
        return True

    def _order(self, function: Callable[[], None]) -> None:
        self._orders.append(function)
        try:
            self._mouth.send(b".")
        except OSError:  # no other worker is left, and the thread has ended
            pass

    # In the thread.

    def _watch(self) -> None:
        with selectors.DefaultSelector() as self._selector:
            for connection in (self._ear, *self._links.values()):
                self._selector.register(connection, selectors.EVENT_READ)
            beat = looked = time.monotonic()
            for link in list(self._links.values()):
                self._hear(link)  # what came with the last word of the rendezvous
            while self._links:
                ready = [key.fileobj for key, _ in self._selector.select(max(0.0, beat - time.monotonic()))]
                now = time.monotonic()
                if now - looked > self.silence_limit / 2:  # this process itself stood still
                    for link in self._links.values():
                        link.heard = now
                looked = now
                if self._ear in ready:
                    self._ear.recv(4096)
                if now >= beat:
                    beat = now + self._beat
                    for link in self._links.values():
                        link.send()
                    ready = (self._ear, *self._links.values())  # also those that are silent
                for link in ready:
                    if link is not self._ear and not link.over:  # a message of another link may have ended it
                        self._hear(link)
                while self._orders and self._links:
                    self._orders.popleft()()
        self._done.set()
        self._close()

    def _hear(self, link: rendezvous.Connection) -> None:
        for message in link.receive():
            if "cause" in message:
                return self._end_for(_Cause(**message["cause"]))
            if "goodbye" in message:
                link.left = True
        if link.over:
            self._selector.unregister(link)
            link.close()
            del self._links[link.index]
        if link.left:
            if not self.cluster.is_chief:
                self._done.set()
            elif self._ending == "goodbye" and all(link.left for link in self._links.values()):
                self._stop()
        elif self._ending == "last words" and not self.cluster.is_chief:
            if link.over:
                self._done.set()
        elif link.over:
            self._give_up(link, "died; see its log")
        elif link.silence > self.silence_limit:
            self._give_up(link, f"sent nothing for {self.silence_limit:g} s: it is frozen or disconnected")

    def _give_up(self, link: rendezvous.Connection, what: str) -> None:
        cause = _Cause(link.index, EXIT_FAILED, f"{what}; {_AGAIN}")
        link.send(cause.as_message())  # a frozen worker may wake up
        self._end_for(cause)

    def _report(self, cause: _Cause) -> None:
        """Sends the last words of this process."""
        if self.cluster.is_chief:
            self._end_for(cause)
        else:
            self._links[0].send(cause.as_message())  # the chief sends it back

    def _end_for(self, cause: _Cause) -> None:
        """Ends this process for the first cause, which the chief sends to all, unless the cause is its own."""
        own = self._ending == "last words" and cause.index == self.cluster.index
        if not own:
            self._named.set()
        if self.cluster.is_chief:
            for link in self._links.values():
                link.send(cause.as_message())
        self._drain()
        if not own:
            self._exit(cause)

    def _say_goodbye(self) -> None:
        if not self.cluster.is_chief:
            self._links[0].send({"goodbye": True})
        elif all(link.left for link in self._links.values()):
            self._stop()

    def _stop(self) -> None:
        if self.cluster.is_chief:
            for link in self._links.values():
                link.send({"goodbye": True})
        self._drain()

    def _drain(self) -> None:
        for link in self._links.values():
            self._selector.unregister(link)
        rendezvous.drain(list(self._links.values()), _DRAIN)
        self._links.clear()

    def _exit(self, cause: _Cause) -> None:
        role = ", the chief," if cause.index == 0 else ""
        error, status = ("", "preempted") if cause.code == EXIT_PREEMPTED else ("error: ", "failed")
        sentence = f"worker {cause.index} ({self.cluster.workers[cause.index]}){role} {cause.what}"
        console.last_line(f"looplib: {error}{sentence}")
        if self._save:
            self._save.join(_SAVE)
        # In a thread, because the main one may hold what this needs, such as the lock of a stream or a device.
        note = threading.Thread(target=self._note, args=(status, sentence if error else ""), daemon=True)
        note.start()
        note.join(_NOTE)
        os._exit(cause.code)

    def _close(self) -> None:
        for connection in (self._ear, self._mouth, *self._links.values()):
            connection.close()
