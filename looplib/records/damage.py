"""Damaged records, left out up to a number of them."""

import threading
from collections.abc import Sequence
from typing import Any

from absl import logging

from looplib.errors import UsageError
from looplib.records.indexed import BadRecordError
from looplib.records.sources import Source, items


class Tolerant:
    """A source whose damaged records are left out.

    Which records these are depends on the files alone, so that a resumed run leaves out the same ones.

    Args:
      source: the records.
      most: how many may be damaged.
      replace: whether the next good record, by number, comes in place of each, so that batches stay full; else None.
    """

    def __init__(self, source: Source, most: int, replace: bool) -> None:
        self._source, self._most, self._replace = source, most, replace
        self._bad: set[int] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Returns records by number.

        Raises:
          UsageError: if more records are damaged than may be.
        """
        try:
            return items(self._source, numbers)
        except BadRecordError:
            return [self._good(int(number)) for number in numbers]

    def _good(self, number: int) -> Any:
        for candidate in range(number, number + self._most + 1):
            try:
                return items(self._source, [candidate % len(self)])[0]
            except BadRecordError as error:
                self._note(error)
                if not self._replace:
                    return None
        raise AssertionError("unreachable: as many damaged records in a row were refused")

    def _note(self, error: BadRecordError) -> None:
        with self._lock:
            is_new = error.number not in self._bad
            self._bad.add(error.number)
            count = len(self._bad)
        if count > self._most:  # each time: what was read ahead may be dropped and read again
            raise UsageError(f"{count} records are damaged, and --bad_records allows {self._most}: {error}") from error
        if is_new:
            logging.warning("left out a damaged record, %d of at most %d: %s", count, self._most, error)
