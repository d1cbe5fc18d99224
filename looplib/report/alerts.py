"""Alerts about runs: what has happened to one, by its directory alone, and how that is sent."""

import base64
import collections
import dataclasses
import importlib.util
import json
import math
import operator
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from looplib.base.decoding import SHOWN
from looplib.base.messages import gist, join_names
from looplib.errors import FlagError, PluginError
from looplib.masks import masked, masked_text
from looplib.run.directory import RunDir
from looplib.run.records import Record
from looplib.run.report import REJECTED, Rollback, StartEntry
from looplib.run.status import RunStatus, read_status

KINDS = {
    "failed": "the run has ended with an error, such as a guard's",
    "rollback": "a guard has led the run back to a checkpoint",
    "preempted": "a signal or --max_time has ended the run, and it is saved",
    "killed": "the process is gone without a word, as after SIGKILL",
    "silent": "the run is alive and reports nothing, or its machine has vanished",
    "recovered": "the run reports again",
    "not_finite": "a metric is NaN or infinite for the first time",
    "worse": "a metric meets a condition of --alert_when",
    "rejected": "an export was not published, such as because its model is worse than the one that is served",
    "done": "the run has reached its end",
}
"""The events that alerts are about, by `Alert.kind`."""

_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_CONDITION = re.compile(r"\s*([^\s/<>=]{1,200})/([^\s<>=]{1,200})\s*(<=|>=|<|>)\s*(\S{1,40})\s*")


@dataclasses.dataclass(frozen=True)
class Alert:
    """A message about a run.

    Attributes:
      kind: a name in `KINDS`.
      run: the run directory; its URL, if it is in an object store.
      step: the global step; None where it is not known.
      sentence: what has happened.
      host: the machine that tells it.
      time: seconds since the epoch.
    """

    kind: str
    run: str
    step: int | None
    sentence: str
    host: str = dataclasses.field(default_factory=socket.gethostname)
    time: float = dataclasses.field(default_factory=time.time)

    @property
    def title(self) -> str:
        """One line that says which run it is about, and what has happened to it."""
        return f"{self.run}: {self.kind}" + ("" if self.step is None else f" at step {self.step:,}")

    def as_json(self) -> dict[str, Any]:
        """Returns the fields, and `text`, which chat programs show."""
        return {**dataclasses.asdict(self), "text": f"{self.title}: {self.sentence}"}


@dataclasses.dataclass(frozen=True)
class Condition:
    """A condition on a metric, such as `eval/loss>2.5`.

    Attributes:
      split: "train", or an evaluator's name.
      metric: the name of the metric.
      comparison: "<", "<=", ">" or ">=".
      bound: a finite number.
    """

    split: str
    metric: str
    comparison: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Returns the condition that a text describes.

        Raises:
          UsageError: for a text of another form.
        """
        found = _CONDITION.fullmatch(text)
        try:
            bound = float(found[4]) if found else math.nan
        except ValueError:
            bound = math.nan
        if not found or not math.isfinite(bound):
            raise FlagError(f"--alert_when is {text!r:.300}; expected a metric and its bound, such as eval/loss>2.5")
        return cls(found[1], found[2], found[3], bound)

    def __str__(self) -> str:
        return f"{self.split}/{self.metric}{self.comparison}{self.bound:g}"

    def holds(self, value: float) -> bool:
        """Returns whether a value meets the condition; NaN does not."""
        return _COMPARE[self.comparison](value, self.bound)


ENDED = ("done", "failed", "preempted", "pruned", "killed")
_SENTENCES = {
    "done": "the training has reached its end",
    "failed": "the run has failed",
    "preempted": "the run was ended by a signal or its time limit, and is saved",
    "pruned": "the sweep has ended the run, because other trials were better",
    "killed": "its process is gone without a word",
}


class RunObserver:
    """Finds what is new about a run.

    The first look finds nothing about starts that have ended before it, except about the process that `process` names.
    A start, a rollback and a new run in the directory begin anew: a metric that is still bad is told again, and so are
    steps that are trained again. What the run has kept is not.

    Args:
      folder: the run directory, whose contents may be anything.
      conditions: on metrics.
      process: the id of the process that an alert is expected of, or None.
    """

    def __init__(self, folder: str, conditions: Sequence[Condition] = (), process: int | None = None) -> None:
        self._folder, self._conditions, self._process = folder, conditions, process
        self._run = RunDir(folder)
        self._name = folder  # or the URL of the run
        self._records = self._run.records()
        self._looked = False
        self._start: tuple[Any, ...] = ()  # the newest start
        self._state = ""
        self._missing = False  # whether the process was gone at the last look too
        self._process_ended = False  # before it wrote a report
        self._rollbacks = self._warnings = 0
        self._bad: set[str] = set()  # metrics that are not finite
        self._met: set[Condition] = set()  # conditions that the last value has met
        self._missed = set(self._conditions)  # conditions on metrics that no record has had
        self._written, self._since = 0.0, 0.0  # the time of the run's last news, and of this process's timer then

    @property
    def has_ended(self) -> bool:
        """Whether the newest start had ended at the last look."""
        return self._process_ended or self._state in ENDED

    def look(self) -> list[Alert]:
        """Returns what has happened since the last look, in the order of steps."""
        report = self._run.report(SHOWN)
        self._name = report.url or self._folder if report else self._name
        status = read_status(self._folder, report, self._age())
        starts, newest = (report.starts, report.newest) if report else ([], StartEntry())
        pid = newest.process.pid
        if self._process is not None and not self._looked and pid != self._process:
            if _is_alive(self._process):
                return []  # it has not written its report yet
            self._looked, self._state, self._start = True, status.state, (newest.started, pid)
            self._process_ended = True
            return [Alert("killed", self._name, status.step, "its process has ended before it wrote a report")]
        first, self._looked = not self._looked, True
        known = first and self._process is None
        found = self._of_starts(starts, known)
        if known:
            self._records.skip()
        elif first:
            self._records.know(newest.restored_step)  # an earlier process has told of them
        saved = bool(report and report.saved_step is not None)
        ends = self._of_state(status, saved, known)
        return [*([] if known else self._of_records(self._records.follow())), *found, *ends]

    def _age(self) -> float | None:
        """Returns the seconds since the last news by the timer of this process; clocks may be set, or be another's."""
        now, written = time.monotonic(), self._run.last_written()
        if written != self._written:
            age = 0.0 if self._written else max(0.0, time.time() - written)
            self._written, self._since = written, now - age
        return now - self._since if written else None

    def _of_state(self, status: RunStatus, saved: bool, known: bool) -> list[Alert]:
        state = status.state
        if state == "unknown":  # no report can be read at the moment
            return []
        if state == "killed" and not self._missing and not known:
            self._missing = True  # a run that ends writes its report and lets go of its lock in two steps
            return []
        self._missing = state == "killed"
        before, self._state = self._state, state
        if state == before or known:
            return []
        if state == "silent":
            text = status.detail or "the run is alive and reports nothing"
            return [Alert("silent", self._name, status.step, f"no news for {status.age:.0f} s: {text}")]
        if state in ENDED:
            tells = state in ("failed", "preempted", "pruned") and status.detail
            sentence = status.detail if tells else "; ".join(filter(None, [_SENTENCES[state], status.detail]))
            if state == "killed":
                sentence += f"; run the same command to {'resume' if saved else 'begin again: nothing was saved yet'}"
            if self._missed and self._process is not None:
                missed = join_names(sorted(map(str, self._missed)))
                sentence += f"; no metric of --alert_when was reported for {missed}"
            return [Alert(state, self._name, status.step, sentence)]
        if before == "silent" and state == "running":
            return [Alert("recovered", self._name, status.step, "the run reports again")]
        return []

    def _of_starts(self, starts: Sequence[StartEntry], known: bool) -> list[Alert]:
        """Returns the rollbacks and rejected exports since the last look; notes where the run has begun anew."""
        names = [(start.started, start.process.pid) for start in starts]
        place = names.index(self._start) if self._start in names else -1
        if place < 0 and self._start and starts:
            self._records.go_back(-1)  # another run
        found = []
        for number in range(max(place, 0), len(starts)):
            if number > place:
                self._start, self._state, self._rollbacks, self._process_ended = names[number], "", 0, False
                self._warnings = 0
                self._begin_anew(starts[number].restored_step)
            rollbacks = starts[number].rollbacks
            for rollback in rollbacks[self._rollbacks :]:
                self._begin_anew(rollback.to)
                found.append(self._rollback(rollback))
            new, self._warnings = starts[number].warnings[self._warnings :], len(starts[number].warnings)
            found += [Alert("rejected", self._name, one.step, one.text) for one in new if one.kind == REJECTED]
            self._rollbacks = len(rollbacks)
        return [] if known else found

    def _begin_anew(self, step: int | None) -> None:
        self._bad.clear()
        self._met.clear()
        self._records.go_back(step or 0)

    def _rollback(self, noted: Rollback) -> Alert:
        sentence = f"back to step {noted.to}: {noted.reason or 'no reason is known'}"
        return Alert("rollback", self._name, noted.step, sentence)

    def _of_records(self, records: Sequence[Record]) -> Iterator[Alert]:
        for record in records:
            step, split, metrics = record.shown_step, record.split, record.numbers
            if metrics.get("skipped_steps") and split not in self._bad:
                self._bad.add(split)
                yield Alert("not_finite", self._name, step, f"steps of {split} were skipped by --non_finite=skip")
            for name, value in metrics.items():
                if value is None and (key := f"{split}/{name}") not in self._bad:
                    self._bad.add(key)
                    yield Alert("not_finite", self._name, step, f"{key} is NaN or infinite")
            for condition in self._conditions:
                value = metrics.get(condition.metric)
                if condition.split == split and condition.metric in metrics:
                    self._missed.discard(condition)
                if condition.split != split or value is None:
                    continue
                if not condition.holds(value):
                    self._met.discard(condition)
                elif condition not in self._met:
                    self._met.add(condition)
                    yield Alert("worse", self._name, step, f"{split}/{condition.metric} is {value:g} ({condition})")


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


_TIMEOUT = 10.0  # seconds of an answer
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds between two tries
_MOST_WAITING = 1000  # alerts; older ones are dropped
_WEBHOOKS = ("http", "https")


def check_url(url: str) -> None:
    """Checks an address of alerts, without sending anything.

    Raises:
      UsageError: if it is no URL, or of a service that apprise does not know, or if apprise is needed and missing.
    """
    masked(url, secret=True)  # so that no text has it from now on
    try:
        parts = urllib.parse.urlsplit(url)
        scheme, is_complete = parts.scheme, bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is no number
        scheme, is_complete = "", False
    is_plain = re.fullmatch(r"[!-~]+", url) is not None  # urlsplit leaves out tabs, and HTTP takes no others
    if not is_plain or not scheme or "://" not in url or (scheme in _WEBHOOKS and not is_complete):
        raise FlagError(
            "--alert has a value that is no URL; expected one such as https://example.org/x, with spaces and letters "
            "other than ASCII's as %20 and the like"
        )
    if scheme in _WEBHOOKS:
        return
    if importlib.util.find_spec("apprise") is None:
        raise PluginError(f"an address of {scheme} in --alert needs apprise: pip install 'looplib[alerts]'")
    import apprise

    if not apprise.Apprise().add(url):
        raise FlagError(f"--alert has an address of {scheme} that apprise does not know; see its list of services")


class Sender:
    """Sends alerts to an address, in their order, in a thread of its own, so that no address waits for another one.

    An alert that cannot be sent is tried again later, with longer waits.

    Args:
      url: of a webhook (http or https), which gets the fields of each alert as JSON by POST, with a user and a password
        in the URL by basic authentication; or of apprise.
      say: takes a sentence about an alert that cannot be sent.
    """

    def __init__(self, url: str, say: Callable[[str], None]) -> None:
        check_url(url)
        parts = urllib.parse.urlsplit(url)
        self._url, self._scheme, self._say = url, parts.scheme, say
        self._headers = {"Content-Type": "application/json"}
        user, at, place = parts.netloc.rpartition("@")
        if at and self._scheme in _WEBHOOKS:
            self._url = urllib.parse.urlunsplit(parts._replace(netloc=place))
            name, _, password = user.partition(":")
            pair = b":".join(map(urllib.parse.unquote_to_bytes, (name, password)))
            self._headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
        # The rest of the URL is a secret.
        self._name = f"{parts.scheme}://{parts.hostname}" if parts.scheme in _WEBHOOKS else parts.scheme
        self._waiting: collections.deque[Alert] = collections.deque(maxlen=_MOST_WAITING)
        self._news = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()  # which may hang in a slow answer when the process ends

    @property
    def is_done(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self._waiting

    def add(self, alert: Alert) -> None:
        """Adds an alert to those that wait, with secrets masked."""
        shown = {"run": masked_text(alert.run), "sentence": masked_text(alert.sentence)}
        self._waiting.append(dataclasses.replace(alert, **shown))
        self._news.set()

    def _run(self) -> None:
        pause = _FIRST_WAIT
        while self._news.wait():
            self._news.clear()
            while self._waiting:
                try:
                    self._deliver(alert := self._waiting[0])
                except Exception as error:  # of any library; the run must not notice
                    cause = f"HTTP {error.code}" if isinstance(error, urllib.error.HTTPError) else gist(error)
                    self._say(f"an alert cannot be sent to {self._name}, and is tried again in {pause:.0f} s: {cause}")
                    time.sleep(pause)
                    pause = min(2 * pause, _LONGEST_WAIT)
                    continue
                if self._waiting and self._waiting[0] is alert:  # not dropped meanwhile
                    self._waiting.popleft()
                pause = _FIRST_WAIT

    def _deliver(self, alert: Alert) -> None:
        if self._scheme in _WEBHOOKS:
            body = json.dumps(alert.as_json()).encode()
            request = urllib.request.Request(self._url, body, self._headers)
            _OPENER.open(request, timeout=_TIMEOUT).close()
            return
        import apprise

        service = apprise.Apprise()
        service.add(self._url)
        if not service.notify(body=alert.sentence, title=alert.title):
            raise OSError("the service has not taken it")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Makes a redirection an error: urllib would repeat the request without the alert."""

    def redirect_request(self, *_: Any) -> None:
        """Returns no request."""
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)
