"""How numbers are said."""


def percent(share: float, digits: int = 0) -> str:
    """A share of 1 as "96.11 %"."""
    return f"{100 * share:.{digits}f} %"


def size(count: float) -> str:
    """Bytes as "1.9 GB", "23 MB" or "4 kB"."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if count >= 0.95 * unit:
            return f"{count / unit:.{1 if unit == 1e9 else 0}f} {name}"
    return f"{count / 1e3:.0f} kB"


def pace(rate: float) -> str:
    """A number of things a second as "1,574", "7.3" or "0.021": never none where there are some."""
    return f"{rate:,.0f}" if rate >= 9.95 else f"{rate:.2g}"
