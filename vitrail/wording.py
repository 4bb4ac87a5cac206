"""How numbers are said."""


def percent(share: float, digits: int = 0) -> str:
    """A share of 1 as "96.11 %"."""
    return f"{100 * share:.{digits}f} %"
