"""LearningFinding: what a check has found, for the log, `run.json` and the report page."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class LearningFinding:
    """A finding of a check.

    Attributes:
      kind: "constant predictions", "no change" or "exploding norm".
      subjects: what it is about: names of variables, of a metric, or of an evaluator.
      since: the global step since when it is known.
      text: what was measured, a clause.
      advice: what to do, a clause.
    """

    kind: str
    subjects: tuple[str, ...]
    since: int
    text: str
    advice: str

    @property
    def keys(self) -> list[str]:
        """Returns a key for each subject; a run has one finding of each."""
        return [key(self.kind, subject) for subject in self.subjects]


def key(kind: str, subject: str) -> str:
    """Returns the key of a kind of finding about a subject."""
    return f"{kind}: {subject}"
