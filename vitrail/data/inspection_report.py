"""The report on a data set in words and tables: what stands in it, and what its owner should look at."""

import textwrap
from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vitrail.data.inspection import USUAL_SIDE, Group, Report, SplitReport

WIDTH = 80
FEW = 10  # images of a class: fewer can hardly be learnt, or measured
ALIKE = 0.05  # of the images with a near twin: more than data sets have by accident
UNEVEN = 10  # times as many images in the largest class as in the smallest
NAMED = 10  # of a long list, how many are printed; --json has all
SHOWN_GROUPS = 5


def print_report(report: Report, console: Console) -> None:
    """Tables that fit 80 columns, then the findings."""
    width = min(console.width, WIDTH)
    images, size = (sum(getattr(each, name) for each in report.splits.values()) for name in ("images", "bytes"))
    console.print(Text.assemble((report.source, "bold"), f": {images:,} images, {bytes_text(size)}"), width=width)
    console.print()
    for table in (_overview(report), _resolution(report), _duplicates(report)):
        if table is not None:
            console.print(table, width=width)
            console.print()
    _examples(report, console, width)
    problems = [problem for split in report.splits.values() for problem in split.broken]
    if problems:
        console.print("[bold]unreadable[/bold]", width=width)
        for problem in problems[:NAMED]:
            console.print(_wrapped(f"{shorter(problem.where, report.source)}: {problem.reason}", "  ", width))
        if len(problems) > NAMED:
            console.print(f"  and {len(problems) - NAMED:,} more; --json lists all", width=width)
        console.print()
    found = list(findings(report))
    console.print("[bold]findings[/bold]" if found else "Nothing to complain about.", width=width)
    for sentence in found:
        console.print(_wrapped(sentence, "- ", width, "bold red" if "LEAK" in sentence else ""))


def _wrapped(text: str, start: str, width: int, style: str = "") -> Text:
    """Broken at the width and indented below its start."""
    text = text.encode("utf-8", "replace").decode()  # file names that are no text could not be printed
    lines = textwrap.wrap(text, width, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False)
    return Text("\n".join(lines), style=style, no_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def _overview(report: Report) -> Table:
    splits = list(report.splits.values())
    table = _table("", *report.splits)

    def row(name: str, cells: Sequence[str]) -> None:
        if any(cells):
            table.add_row(name, *map(escape, cells))

    row("images", [f"{each.images:,}" for each in splits])
    row("unreadable", [f"{len(each.broken):,}" for each in splits])
    row("size", [bytes_text(each.bytes) for each in splits])
    row("format", [_shares(each.kinds, each.readable) for each in splits])
    row("width x height", [f"{size[0]} x {size[1]}" if (size := common_size(each)) else "" for each in splits])
    row("classes", ["no labels" if each.classes is None else f"{len(present(each)):,}" for each in splits])
    for position, name in ((0, "smallest class"), (0.5, "median class"), (1, "largest class")):
        row(name, [_class_at(each, position) for each in splits])
    row("largest / smallest", [f"{imbalance(each):.1f}" if present(each) else "" for each in splits])
    row("further labels", [", ".join(f"{name} ({count:,})" for name, count in each.further_labels.items()) for each in splits])
    row("masks", [f"{each.masks:,}, ids {_ranges(each.mask_ids)}" if each.masks else "" for each in splits])
    below = [f"{percent(each.below_usual_side, each.readable)}" if each.readable else "" for each in splits]
    row(f"shorter side < {USUAL_SIDE}", below)
    return table


def _resolution(report: Report) -> Table | None:
    table = _table("resolution", "", "smallest", "25 %", "median", "75 %", "largest")
    table.columns[1].justify = "left"
    for split, each in report.splits.items():
        for number, (name, values) in enumerate(each.resolution.items() if not common_size(each) else ()):
            whole = name in ("width", "height")
            table.add_row("" if number else split, name, *(f"{value:,.0f}" if whole else f"{value:.3g}" for value in values))
    return table if table.row_count else None


def _duplicates(report: Report) -> Table | None:
    if not report.groups:
        return None
    table = _table("duplicates (images)", "exact", "near")
    for split, twins in report.repeats.items():
        table.add_row(f"again in {split}", f"{twins.exact:,}", f"{twins.near:,}")
    for (first, second), twins in report.leaks.items():
        table.add_row(f"of {second} also in {first}", f"{twins.exact:,}", f"{twins.near:,}")
    groups = [group for group in report.groups if group.contradicts]
    table.add_row(
        "groups with different labels", *(f"{sum(group.exact == exact for group in groups):,}" for exact in (True, False))
    )
    return table


def _examples(report: Report, console: Console, width: int) -> None:
    """The groups that matter most: across splits first, then those whose labels contradict each other."""
    groups = sorted(report.groups, key=lambda group: (len(group.splits) < 2, not group.contradicts, not group.exact))
    if not groups:
        return
    console.print("[bold]the same image[/bold] (= exactly, ~ nearly)", width=width)
    for group in groups[:SHOWN_GROUPS]:
        for number, member in enumerate(group.members[:3]):
            sign = "  " if number else ("= " if group.exact else "~ ")
            label = f" ({member.label})" if member.label is not None else ""
            console.print(_wrapped(f"{member.split}{label}: {shorter(member.where, report.source)}", f"  {sign}", width))
        if len(group.members) > 3:
            console.print(f"    and {len(group.members) - 3:,} more", width=width)
    if len(groups) > SHOWN_GROUPS:
        console.print(f"  and {counted(len(groups) - SHOWN_GROUPS, 'more group')}; --json lists all", width=width)
    console.print()


def findings(report: Report) -> Iterator[str]:
    """What the owner of the data should know, the gravest first, a sentence each."""
    total = sum(each.readable for each in report.splits.values())
    near = sum(twins.near for twins in [*report.repeats.values(), *report.leaks.values()])
    alike = near > max(ALIKE * total, 100)
    for (first, second), twins in report.leaks.items():
        readable = report.splits[second].readable
        if twins.exact:
            yield (
                f"LEAK: {counted(twins.exact, 'image')} of {second} ({percent(twins.exact, readable)}) also in {first}, "
                f"pixel for pixel: scores on {second} will be too good; remove them from {first}."
            )
        if twins.near and not alike:
            yield (
                f"Possible LEAK: {counted(twins.near, 'image')} of {second} ({percent(twins.near, readable)}) with a near twin "
                f"in {first}: look at them, scores on {second} may be too good."
            )
    if alike:
        yield (
            f"{near:,} of {total:,} images look nearly like another one: they are too alike (shapes on an even ground, film "
            f"frames) for near duplicates to say much; exact ones do."
        )
    groups = [group for group in report.groups if group.contradicts]
    if groups:
        yield f"{counted(len(groups), 'group')} of duplicates {_carry(groups)} different labels: at most one of them is right."
    for split, each in report.splits.items():
        if each.broken:
            yield f"{len(each.broken):,} of {each.images:,} {split} images cannot be read: mend or remove them."
    for split, twins in report.repeats.items():
        if twins.total:
            yield (
                f"{counted(twins.total, 'image')} of {split} {'repeats' if twins.total == 1 else 'repeat'} another of {split} "
                f"({twins.exact:,} exactly, {twins.near:,} nearly)."
            )
    yield from _class_findings(report)
    small = sum(each.below_usual_side for each in report.splits.values())
    readable = sum(each.readable for each in report.splits.values())
    if small * 2 > readable:
        yield (
            f"{percent(small, readable)} of the images have a shorter side below {USUAL_SIDE} pixels and are enlarged for the "
            f"usual networks: train at a smaller size."
        )


def _carry(groups: list[Group]) -> str:
    return "carries" if len(groups) == 1 else "carry"


def _class_findings(report: Report) -> Iterator[str]:
    labelled = {split: each for split, each in report.splits.items() if each.classes is not None}
    bare = [split for split in report.splits if split not in labelled]
    if bare:
        yield f"No class labels in {' and '.join(bare)}: a classifier can predict there, and neither learn nor be measured."
    for split, each in labelled.items():
        if len(present(each)) == 1:
            yield f"{split} has only one class, {next(iter(present(each)))}: a classifier needs two."
    for split, each in labelled.items():
        few = [name for name, count in present(each).items() if count < FEW]
        if few and split == "train":
            yield f"{counted(len(few), 'class')} of {split} with fewer than {FEW} images: {_list(few)}."
        if imbalance(each) > UNEVEN:
            yield f"The largest class of {split} has {imbalance(each):,.0f} times as many images as the smallest."
        empty = [name for name, count in (each.classes or {}).items() if not count]
        if empty and len(labelled) == 1:
            yield f"{counted(len(empty), 'class')} without an image: {_list(empty)}."
    if len(labelled) > 1:
        everywhere = {name for each in labelled.values() for name in each.classes or {}}
        for split, each in labelled.items():
            missing = sorted(everywhere - set(present(each)))
            if missing:
                yield f"{counted(len(missing), 'class')} without an image in {split}: {_list(missing)}."
        for split in labelled:
            others = {name for other, each in labelled.items() if other != split for name in present(each)}
            alone = sorted(set(present(labelled[split])) - others)
            if alone and len(labelled) > 2:
                yield f"{counted(len(alone), 'class')} in {split} only: {_list(alone)}."


def common_size(split: SplitReport) -> tuple[int, int] | None:
    """(width, height) that all the images have, None if they differ."""
    ends = [(values[0], values[-1]) for name, values in split.resolution.items() if name in ("width", "height")]
    return (round(ends[0][0]), round(ends[1][0])) if ends and all(low == high for low, high in ends) else None


def present(split: SplitReport) -> dict[str, int]:
    """The classes that have images, smallest first."""
    counts = {name: count for name, count in (split.classes or {}).items() if count}
    return dict(sorted(counts.items(), key=lambda item: item[1]))


def imbalance(split: SplitReport) -> float:
    counts = list(present(split).values())
    return counts[-1] / counts[0] if counts else 1.0


def _class_at(split: SplitReport, position: float) -> str:
    classes = list(present(split).items())
    if not classes:
        return ""
    name, count = classes[round(position * (len(classes) - 1))]
    return f"{name}: {count:,}"


def _shares(kinds: dict[str, int], total: int) -> str:
    names = list(kinds)
    if len(names) == 1:
        return names[0]
    rest = sum(kinds[name] for name in names[3:])
    shares = [f"{name} {percent(kinds[name], total)}" for name in names[:3]]
    return "\n".join(shares + ([f"others {percent(rest, total)}"] if rest else []))


def _ranges(ids: list[int]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    breaks = np.flatnonzero(np.diff(ids) > 1) + 1
    runs = [part.tolist() for part in np.split(np.array(ids), breaks)]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _list(names: list[str]) -> str:
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def counted(number: int, noun: str) -> str:
    plural = noun if number == 1 else f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {plural}"


def percent(part: int, whole: int) -> str:
    """Rounded, but neither 0 % of something nor 100 % of not quite all."""
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 0.01:
        return "< 0.01 %"
    if 99.9 < share < 100:
        return "> 99.9 %"
    return f"{share:.2g} %" if share < 1 else f"{share:.3g} %"


def bytes_text(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.0f} {unit}" if count >= 100 * size else f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def shorter(where: str, source: str) -> str:
    """A place without the part of it that the user has typed."""
    return where.replace(source.rstrip("/") + "/", "")
