"""What is raised for a user to mend."""


class UsageError(ValueError):
    """Bad input: says what was found, what was expected and what to do.

    Binaries print it as one last line, without a stack trace, and exit with code 1.
    """


class DivergenceError(UsageError):
    """A loss, gradient or weight was not finite, or the loss jumped, and the policy was to halt or could not go on."""


def positive(name, value):
    """Raises `UsageError` unless `value` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} is {value!r}; expected a whole number of at least 1")
