"""Numbers, shares and durations as the console and the tools show them."""

import math


def format_number(value: float) -> str:
    """Formats a number for a person: whole numbers as they are, others with four significant digits.

    Args:
      value: int or float.

    Returns:
      str, such as `1797`, `0.9833`, `1.2e-05`.
    """
    if isinstance(value, int) or (abs(value) >= 1000 and math.isfinite(value)):
        return f"{value:.0f}"
    return f"{value:.4g}"


def format_share(share: float) -> str:
    """Formats a share of a whole for a person, such as `12%`, or `<1%` for less than that but not nothing."""
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"


def format_seconds(seconds: float) -> str:
    """Formats a duration for a person, such as `19 s`, `12 min`, `5.2 h` or `3.1 days`."""
    for unit, limit in (("s", 120), ("min", 120), ("h", 48)):
        if seconds < limit:
            return f"{seconds:.1f} h" if unit == "h" else f"{seconds:.0f} {unit}"
        seconds /= 60 if unit != "h" else 24
    return f"{seconds:.1f} days"
