"""The one exception type for mistakes that a user can mend."""


class UsageError(ValueError):
    """Bad input: says what was found, what was expected and what to do.

    Binaries print it as one last line, without a stack trace, and exit with code 1.
    """
