"""Sender: alerts to one address, by a webhook or by whatever apprise supports."""

import base64
import collections
import dataclasses
import importlib.util
import json
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

from looplib.base.messages import gist
from looplib.errors import FlagError, PluginError
from looplib.masks import masked, masked_text
from looplib.report.alert import Alert

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
