"""What a value of ``compression`` says; a config is checked by it, without torch."""

import re
from fractions import Fraction

_DECIMAL = re.compile(r"(?=\.?[0-9])[0-9]{0,20}(\.[0-9]{0,20})?(e-?[0-9]{1,2})?")
_INTEGER = re.compile(r"[0-9]{1,9}")


def read_codec_name(text: str) -> tuple[str, Fraction]:
    """Return kind and number: ("topk", F), ("powersgd", R), ("int", bits) or ("none", 0).

    F is the decimal fraction as written, not the nearest float: ceil(F n) is exact.

    Raises
    ------
    ValueError
        If the text is none of them, F is not in (0, 1], or R is not an integer >= 1.
    """
    kind, colon, argument = text.partition(":")
    if text == "none":
        return "none", Fraction(0)
    if text in ("int8", "int4"):
        return "int", Fraction(text.removeprefix("int"))
    if kind == "topk" and colon:
        if not _DECIMAL.fullmatch(argument) or not 0 < (fraction := Fraction(argument)) <= 1:
            raise ValueError(
                f"compression=topk:F must have a number 0 < F <= 1, got {text!r}; "
                "use topk:0.01 to send 1 % of the values"
            )
        return kind, fraction
    if kind == "powersgd" and colon:
        if not _INTEGER.fullmatch(argument) or int(argument) < 1:
            raise ValueError(
                f"compression=powersgd:R must have an integer R >= 1, got {text!r}; "
                "use powersgd:2 for updates of rank 2"
            )
        return kind, Fraction(argument)
    raise ValueError(
        f"compression must be none, int8, int4, topk:F or powersgd:R, got {text!r}; "
        "use for example int8 or topk:0.01"
    )


BROADCASTS = ("none", "int8", "int4")


def check_broadcast(text: str) -> None:
    """Raise ValueError for what is no codec of broadcasts: a client that was away has no x."""
    if text not in BROADCASTS:
        raise ValueError(
            f"broadcast must be none, int8 or int4, got {text!r}; codecs of updates need the model "
            "that every client had before"
        )
