"""Sender: alerts to one address, by a webhook or by whatever apprise supports."""

import collections
import importlib.util
import json
import time
import urllib.error
import urllib.parse
import urllib.request

from absl import logging

from looplib.errors import FlagError, PluginError
from looplib.extras.alerts.alert import Alert
from looplib.messages import gist

_TIMEOUT = 10.0  # seconds of an answer
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds between two tries
_MOST_WAITING = 1000  # alerts; older ones are dropped
_WEBHOOKS = ("http", "https")


def check_url(url: str) -> None:
    """Checks an address of alerts, without sending anything.

    Raises:
      UsageError: if it is no URL, or of a service that apprise does not know, or if apprise is needed and missing.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        scheme, is_complete = parts.scheme, bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is no number
        scheme, is_complete = "", False
    if not scheme or "://" not in url or (scheme in _WEBHOOKS and not is_complete):
        raise FlagError("--alert has a value that is no URL; expected one such as https://hooks.example.org/x")
    if scheme in _WEBHOOKS:
        return
    if importlib.util.find_spec("apprise") is None:
        raise PluginError(f"--alert={scheme}://... needs the package apprise: pip install 'looplib[alerts]'")
    import apprise

    if not apprise.Apprise().add(url):
        raise FlagError(f"--alert={scheme}://... is no address that apprise knows; see its list of services")


class Sender:
    """Sends alerts to an address, in their order; one that cannot be sent is tried again later, with longer waits.

    Args:
      url: of a webhook (http or https), which gets the fields of each alert as JSON by POST; or of apprise.
    """

    def __init__(self, url: str) -> None:
        check_url(url)
        self._url, self._scheme = url, urllib.parse.urlsplit(url).scheme
        self._waiting: collections.deque[Alert] = collections.deque(maxlen=_MOST_WAITING)
        self._next, self._wait = 0.0, _FIRST_WAIT

    @property
    def is_done(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self._waiting

    def add(self, alert: Alert) -> None:
        """Adds an alert to those that wait."""
        self._waiting.append(alert)

    def send(self) -> None:
        """Sends what waits, unless the address has failed a short time ago; takes 10 s at most for each alert."""
        while self._waiting and time.monotonic() >= self._next:
            try:
                self._deliver(self._waiting[0])
            except Exception as error:  # of any library; the run must not notice
                # The URL is a secret, and is in many errors.
                cause = f"HTTP {error.code}" if isinstance(error, urllib.error.HTTPError) else gist(error)
                logging.warning("an alert by %s cannot be sent: %s", self._scheme, cause.replace(self._url, "<masked>"))
                self._next, self._wait = time.monotonic() + self._wait, min(2 * self._wait, _LONGEST_WAIT)
                return
            self._waiting.popleft()
            self._wait = _FIRST_WAIT

    def _deliver(self, alert: Alert) -> None:
        if self._scheme in _WEBHOOKS:
            body = json.dumps(alert.as_json()).encode()
            request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
                answer.read(1 << 16)
            return
        import apprise

        service = apprise.Apprise()
        service.add(self._url)
        if not service.notify(body=alert.sentence, title=alert.title):
            raise OSError("the service has not taken it")
