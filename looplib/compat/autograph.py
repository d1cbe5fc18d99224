"""AutoGraph: it converts the user's functions, and of looplib's own only the inner loop."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

Function = TypeVar("Function", bound=Callable[..., Any])


def converted(function: Function) -> Function:
    """Returns a function that AutoGraph converts in each trace, also if what calls it is not converted.

    What it calls is converted too, unless that is marked by `do_not_convert`. Without a trace, as with `loop="eager"`,
    the function is called as it is.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not tf.inside_function():
            return function(*args, **kwargs)
        return _converting()(function, args, kwargs)

    return tf.autograph.experimental.do_not_convert(call)


@functools.cache
def _converting() -> Callable[[Callable[..., Any], tuple, dict[str, Any]], Any]:
    return tf.autograph.to_graph(_call)


def _call(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)
