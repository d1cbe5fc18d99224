"""Results that several tests share, each made when a test first asks for it."""

from collections.abc import Callable
from typing import Any


class Results(dict):
    """A dict whose missing values are made from their keys.

    Args:
      make: takes a key.
    """

    def __init__(self, make: Callable[[Any], Any]):
        super().__init__()
        self._make = make

    def __missing__(self, key):
        self[key] = self._make(key)
        return self[key]
