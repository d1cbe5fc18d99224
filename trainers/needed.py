"""Packages that only some trainers need, from looplib's extras."""

import contextlib
from collections.abc import Iterator

from looplib import UsageError


@contextlib.contextmanager
def extra(name: str, user: str) -> Iterator[None]:
    """Turns a failed import of a package of looplib's extras, in a `with` block, into a sentence that names the extra.

    Args:
      name: the extra. With "models", pip takes TensorFlow 2.20, which tf-models-official requires.
      user: what needs the packages, as the start of a sentence.

    Raises:
      UsageError: if a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        note = ", which brings TensorFlow 2.20" if name == "models" else ""
        raise UsageError(
            f"{user} needs the package {error.name}, which is not installed; install looplib[{name}]{note}"
        ) from error
