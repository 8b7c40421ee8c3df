"""What ``max-update-norm`` can be, without anything that is slow to import."""

import math

NONE = "none"


def read_limit(text: str) -> tuple[float, bool]:
    """Return the bound and whether it is a multiple of the median; infinity for ``none``.

    Raises
    ------
    ValueError
        If ``text`` is neither ``none``, a number > 0, nor such a number and ``x``.
    """
    if text == NONE:
        return math.inf, False
    relative = text.endswith("x")
    try:
        value = float(text.removesuffix("x"))
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)) or (relative and value < 1):
        raise ValueError(
            f"max-update-norm must be none, a norm > 0 such as 5.0, or a multiple >= 1 of the "
            f"median such as 10x, got {text!r}"
        )
    return value, relative
