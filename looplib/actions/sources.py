"""What the metadata servers of GCP and AWS say of the near end of a machine."""

import abc
import dataclasses
import datetime
import time
from collections.abc import Iterator

from looplib.actions.metadata import MetadataAnswer, MetadataServer
from looplib.base.files import parse_json
from looplib.run import values
from looplib.run.notice import iso_time


@dataclasses.dataclass(frozen=True)
class Announcement:
    """What a source says is to come.

    Attributes:
      kind: in its own words.
      deadline: when it comes at the earliest, in ISO 8601; None where that is not known.
      ends: whether a run has to end for it.
    """

    kind: str
    deadline: str | None
    ends: bool


class NoticeSource(abc.ABC):
    """A metadata server that announces the end of the machine; the machine asks it again and again.

    Attributes:
      name: of the cloud.
      seconds: between two looks.
      server: the server.
    """

    name: str
    seconds: float
    server: MetadataServer

    @abc.abstractmethod
    def look(self) -> Iterator[Announcement]:
        """Yields what is announced now.

        Raises:
          OSError, HTTPException, ValueError: if the server does not answer, or says something else.
        """


class GcpNotices(NoticeSource):
    """Compute Engine: a Spot VM is preempted, or the host gets maintenance. GCE_METADATA_HOST has another address."""

    name = "gcp"
    seconds = 1.0  # of the 30 s after a notice

    def __init__(self) -> None:
        self.server = MetadataServer("GCE_METADATA_HOST", "169.254.169.254")

    def look(self) -> Iterator[Announcement]:
        """See `NoticeSource`."""
        if self._value("preempted", "TRUE", "FALSE") == "TRUE":
            yield Announcement("preempted", iso_time(time.time() + 30), True)
        goes, moves = "TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE"
        event = self._value("maintenance-event", "NONE", goes, moves)
        if event == goes:
            yield Announcement(event, iso_time(time.time() + 60), True)
        elif event == moves:
            yield Announcement(event, None, False)

    def _value(self, name: str, *expected: str) -> str:
        answer = self.server.ask(f"/computeMetadata/v1/instance/{name}", {"Metadata-Flavor": "Google"})
        if answer.status != 200 or answer.text.strip() not in expected:
            raise _unexpected(name, answer)
        return answer.text.strip()


class AwsNotices(NoticeSource):
    """EC2: a Spot instance is interrupted, by IMDSv2. AWS_EC2_METADATA_SERVICE_ENDPOINT has another address."""

    name = "aws"
    seconds = 5.0  # of the two minutes after a notice, as Amazon recommends

    def __init__(self) -> None:
        self.server = MetadataServer("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254")
        self._token = ""

    def look(self) -> Iterator[Announcement]:
        """See `NoticeSource`."""
        if (answer := self._item("spot/instance-action")).status == 200:
            said = values.mapping(parse_json(answer.text))
            if (action := said.get("action")) not in ("terminate", "stop", "hibernate"):
                raise _unexpected("instance-action", answer)
            yield Announcement(action, _utc(said.get("time")), True)
        if self._item("events/recommendations/rebalance").status == 200:
            yield Announcement("rebalance recommendation", None, False)

    def _item(self, name: str) -> MetadataAnswer:
        """Returns the answer for a name; its status is 404 for an unknown name."""
        for is_new in (not self._token, True):
            if is_new:
                ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
                given = self.server.ask("/latest/api/token", ttl, "PUT")
                if given.status != 200 or not _is_header(given.text):
                    raise _unexpected("token", given)
                self._token = given.text
            answer = self.server.ask(f"/latest/meta-data/{name}", {"X-aws-ec2-metadata-token": self._token})
            if answer.status != 401:  # the token is too old
                break
        if answer.status not in (200, 404):
            raise _unexpected(name, answer)
        return answer


def _unexpected(name: str, answer: MetadataAnswer) -> ValueError:
    return ValueError(f"{name} has the unexpected answer {answer.status} {answer.text!a:.100}")


def _is_header(text: str) -> bool:
    """Returns whether a text can be sent as a header."""
    return 0 < len(text) <= 1000 and text.isascii() and text.isprintable()


def _utc(text: object) -> str | None:
    """Returns a time in ISO 8601; None for what is none."""
    try:
        found = datetime.datetime.fromisoformat(values.text(text, 100).replace("Z", "+00:00"))
        return iso_time((found if found.tzinfo else found.replace(tzinfo=datetime.timezone.utc)).timestamp())
    except (ValueError, TypeError, OverflowError, OSError, IndexError):
        return None
