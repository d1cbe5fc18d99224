"""The scope of a strategy, in which variables have a copy for each replica."""

import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def outside(make: Callable[[], T]) -> T:
    """Returns what a function makes, such as a variable of the host, as if no scope of a strategy were entered.

    A scope belongs to a thread, so that another thread is outside of it.
    """
    with concurrent.futures.ThreadPoolExecutor(1, "looplib-outside") as executor:
        return executor.submit(make).result()
