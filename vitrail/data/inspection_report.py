"""Prints the report of an inspection as tables and a list of findings."""

import textwrap
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vitrail.data.image_formats import describe_skipped
from vitrail.data.inspection import DEFAULT_SIZE, MaskReport, Report, SplitReport
from vitrail.data.mask_classes import NAME_IDS
from vitrail.data.object_inspection import object_findings
from vitrail.formatting import escape_control, format_bytes, format_ranges, pluralize

WIDTH = 80
MIN_CLASS_IMAGES = 10  # fewer images of a class are reported
MAX_NEAR_FRACTION = 0.05  # above it, near duplicates are not reported one by one
MAX_IMBALANCE = 10  # ratio of the largest to the smallest class above which it is reported
MAX_LISTED = 10  # items of a list that are printed; --json has all
MAX_GROUPS = 5
MAX_MASK_CLASSES = 40


def print_report(report: Report, console: Console) -> None:
    """Print tables and findings of at most 80 columns; lines with paths are not wrapped."""
    width = min(console.width, WIDTH)
    images, size = (sum(getattr(each, name) for each in report.splits.values()) for name in ("images", "bytes"))
    console.print(
        Text.assemble((escape_control(report.source), "bold"), f": {images:,} images, {format_bytes(size)}"), width=width
    )
    console.print()
    for table in (_overview(report), _resolution(report), _mask_classes(report), _object_classes(report), _duplicates(report)):
        if table is not None:
            console.print(table, width=width)
            console.print()
    _examples(report, console, width)
    splits = report.splits.values()
    problems = [f"{shorten(each.location, report.source)}: {each.reason}" for split in splits for each in split.unreadable]
    for title, lines in (
        ("unreadable", problems),
        ("skipped", list(dict.fromkeys(path for each in splits for path in each.skipped))),
    ):
        if lines:
            console.print(f"[bold]{title}[/bold]", width=width)
            for line in lines[:MAX_LISTED]:
                _print_location(line, "  ", console)
            if len(lines) > MAX_LISTED:
                console.print(f"  and {len(lines) - MAX_LISTED:,} more; --json lists all", width=width)
            console.print()
    messages = list(findings(report))
    console.print("[bold]findings[/bold]" if messages else "No problems found.", width=width)
    for message in messages:
        console.print(_wrapped(message, "- ", width, "bold red" if "LEAK" in message else ""))


def _print_location(text: str, start: str, console: Console) -> None:
    """Print a line with a path on one line, however long it is."""
    console.print(Text(start + escape_control(text), no_wrap=True), soft_wrap=True)


def _wrapped(text: str, start: str, width: int, style: str = "") -> Text:
    """Wrap text at `width`, with a hanging indent after `start`."""
    lines = textwrap.wrap(
        escape_control(text), width, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False
    )
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
            table.add_row(name, *(escape(escape_control(cell, "\n")) for cell in cells))

    row("images", [f"{each.images:,}" for each in splits])
    row("unreadable", [f"{len(each.unreadable):,}" for each in splits])
    row("size", [format_bytes(each.bytes) for each in splits])
    row("format", [_shares(each.formats, each.readable) for each in splits])
    row("width x height", [f"{size[0]} x {size[1]}" if (size := common_size(each)) else "" for each in splits])
    row("classes", ["no labels" if each.classes is None else f"{len(present(each)):,}" for each in splits])
    for position, name in ((0, "smallest class"), (0.5, "median class"), (1, "largest class")):
        row(name, [_class_at(each, position) for each in splits])
    row("largest / smallest", [f"{imbalance(each):.1f}" if present(each) else "" for each in splits])
    row("extra labels", [", ".join(f"{name} ({count:,})" for name, count in each.extra_labels.items()) for each in splits])
    row("masks", [f"{each.masks:,}, ids {format_ranges(each.mask_ids)}" if each.masks else "" for each in splits])
    below = [f"{percent_of(each.below_default_size, each.readable)}" if each.readable else "" for each in splits]
    row(f"shorter side < {DEFAULT_SIZE}", below)
    return table


def _resolution(report: Report) -> Table | None:
    table = _table("resolution", "", "smallest", "25 %", "median", "75 %", "largest")
    table.columns[1].justify = "left"
    for split, each in report.splits.items():
        for number, (name, values) in enumerate(each.resolution.items() if not common_size(each) else ()):
            is_integer = name in ("width", "height")
            table.add_row("" if number else split, name, *(f"{value:,.0f}" if is_integer else f"{value:.3g}" for value in values))
    return table if table.row_count else None


def _mask_classes(report: Report) -> Table | None:
    """The share of each class in the labeled pixels of masks, and the images in which it occurs."""
    reports = {split: each.mask_report for split, each in report.splits.items() if each.mask_report is not None}
    if not reports:
        return None
    table = _table("masks", "id", *(f"{split} {what}" for split in reports for what in ("pixels", "images")))
    first = next(iter(reports.values()))
    for row, (name, number) in enumerate((entry["name"], entry["id"]) for entry in first.classes[:MAX_MASK_CLASSES]):
        entries = [each.classes[row] if row < len(each.classes) else {"share": 0.0, "images": 0} for each in reports.values()]
        cells = [cell for entry in entries for cell in (f"{100 * entry['share']:.2f} %", f"{entry['images']:,}")]
        table.add_row(escape(escape_control(name)), str(number), *cells)
    if len(first.classes) > MAX_MASK_CLASSES:
        table.add_row(f"and {len(first.classes) - MAX_MASK_CLASSES} more; --json lists all")
    table.add_row("ignored", "", *(cell for each in reports.values() for cell in (f"{100 * each.ignored_share:.2f} %", "")))
    return table


def _object_classes(report: Report) -> Table | None:
    """The objects of each class, and the images in which it occurs."""
    reports = {split: each.object_report for split, each in report.splits.items() if each.object_report is not None}
    if not reports:
        return None
    table = _table("objects", *(f"{split} {what}" for split in reports for what in ("objects", "images")))
    first = next(iter(reports.values()))
    for row, name in enumerate(entry["name"] for entry in first.classes[:MAX_MASK_CLASSES]):
        cells = [f"{each.classes[row][what]:,}" for each in reports.values() for what in ("objects", "images")]
        table.add_row(escape(escape_control(name)), *cells)
    if len(first.classes) > MAX_MASK_CLASSES:
        table.add_row(f"and {len(first.classes) - MAX_MASK_CLASSES} more; --json lists all")
    table.add_row("all", *(cell for each in reports.values() for cell in (f"{each.total:,}", "")))
    for size in ("small", "medium", "large"):
        table.add_row(size, *(cell for each in reports.values() for cell in (f"{each.sizes.get(size, 0):,}", "")))
    table.add_row("without objects", *(cell for each in reports.values() for cell in ("", f"{each.none:,}")))
    return table


def _duplicates(report: Report) -> Table | None:
    if not report.groups:
        return None
    table = _table("duplicates (images)", "exact", "near")
    for split, counts in report.repeats.items():
        table.add_row(f"within {split}", f"{counts.exact:,}", f"{counts.near:,}")
    for (first, second), counts in report.leaks.items():
        table.add_row(f"{second} images also in {first}", f"{counts.exact:,}", f"{counts.near:,}")
    groups = [group for group in report.groups if group.labels_differ]
    table.add_row(
        "groups with different labels", *(f"{sum(group.exact == exact for group in groups):,}" for exact in (True, False))
    )
    return table


def _examples(report: Report, console: Console, width: int) -> None:
    """Print the most important groups: those across splits first, then those with different labels."""
    groups = sorted(report.groups, key=lambda group: (len(group.splits) < 2, not group.labels_differ, not group.exact))
    if not groups:
        return
    console.print("[bold]duplicates[/bold] (= exact, ~ near)", width=width)
    for group in groups[:MAX_GROUPS]:
        for number, member in enumerate(group.members[:3]):
            sign = "  " if number else ("= " if group.exact else "~ ")
            label = f" ({member.label})" if member.label is not None else ""
            _print_location(f"{member.split}{label}: {shorten(member.location, report.source)}", f"  {sign}", console)
        if len(group.members) > 3:
            console.print(f"    and {len(group.members) - 3:,} more", width=width)
    if len(groups) > MAX_GROUPS:
        console.print(f"  and {pluralize(len(groups) - MAX_GROUPS, 'more group')}; --json lists all", width=width)
    console.print()


def findings(report: Report) -> Iterator[str]:
    """Yield the findings as messages, the most important first."""
    total = sum(each.readable for each in report.splits.values())
    near = sum(counts.near for counts in [*report.repeats.values(), *report.leaks.values()])
    too_similar = near > max(MAX_NEAR_FRACTION * total, 100)
    for (first, second), counts in report.leaks.items():
        readable = report.splits[second].readable
        if counts.exact:
            yield (
                f"LEAK: {pluralize(counts.exact, 'image')} of {second} ({percent_of(counts.exact, readable)}) also in {first} "
                f"(equal pixels): results on {second} will be too good; remove them from {first}."
            )
        if counts.near and not too_similar:
            yield (
                f"Possible LEAK: {pluralize(counts.near, 'image')} of {second} ({percent_of(counts.near, readable)}) nearly "
                f"equal to images of {first}: check them; results on {second} may be too good."
            )
    if too_similar:
        yield (
            f"{near:,} of {total:,} images are nearly equal to another one: the images are too similar (such as video frames) "
            f"for near duplicates to be meaningful; only exact duplicates are."
        )
    groups = [group for group in report.groups if group.labels_differ]
    if groups:
        have = "has" if len(groups) == 1 else "have"
        yield f"{pluralize(len(groups), 'group')} of duplicates {have} different labels: at most one is correct."
    for split, each in report.splits.items():
        if each.unreadable:
            yield f"{len(each.unreadable):,} of {each.images:,} {split} images cannot be read: fix or remove them."
        if skipped := describe_skipped(each.skipped):
            yield f"{split}: {skipped}."
        if each.mask_report is not None:
            yield from _mask_findings(split, each.mask_report, report.source)
        if each.object_report is not None:
            yield from object_findings(split, each.object_report)
    for split, counts in report.repeats.items():
        if counts.total:
            yield (
                f"{pluralize(counts.total, 'image')} of {split} {'duplicates' if counts.total == 1 else 'duplicate'} another one "
                f"of {split} ({counts.exact:,} exact, {counts.near:,} near)."
            )
    yield from _class_findings(report)
    # Segmentation and detection train on crops that are larger than the images.
    labeled = [each for each in report.splits.values() if each.mask_report is None and each.object_report is None]
    small, readable = (sum(getattr(each, name) for each in labeled) for name in ("below_default_size", "readable"))
    if small * 2 > readable:
        yield (
            f"{percent_of(small, readable)} of the images have a shorter side below {DEFAULT_SIZE} pixels: consider training at "
            f"a smaller image size."
        )


def _mask_findings(split: str, masks: MaskReport, source: str) -> Iterator[str]:
    if masks.unknown:
        number, location = next(iter(masks.unknown.items()))
        ids = format_ranges(sorted(masks.unknown))
        yield (
            f"Masks of {split} have ids that are not classes: {ids}, first {number} in {shorten(location, source)}; name them in "
            "classes.json, or list them there under ignore."
        )
    for found, what in (
        (masks.other_sizes, "a mask of another size than the image"),
        (masks.ignored, "a mask without any class"),
    ):
        if found:
            have = "has" if len(found) == 1 else "have"
            yield f"{pluralize(len(found), 'image')} of {split} {have} {what}, first {shorten(found[0], source)}."
    if masks.unmasked:
        yield f"{pluralize(masks.unmasked, 'image')} of {split} without a mask: not used for segmentation."
    if len(masks.classes) == 1:
        yield f"The masks of {split} have one class only, id {masks.classes[0]['id']}: {NAME_IDS}"
    missing = [str(entry["name"]) for entry in masks.classes if not entry["images"]]
    if missing:
        yield f"{pluralize(len(missing), 'class')} of the masks of {split} without pixels: {_list(missing)}."


def _class_findings(report: Report) -> Iterator[str]:
    for each in report.splits.values():
        yield from each.defects
    labeled = {split: each for split, each in report.splits.items() if each.classes is not None}
    unlabeled = [
        split for split, each in report.splits.items() if split not in labeled and not (each.mask_report or each.object_report)
    ]
    if unlabeled:
        yield f"No class labels in {' and '.join(unlabeled)}: usable for prediction and self-supervised training."
    for split, each in labeled.items():
        if len(present(each)) == 1:
            yield f"{split} has only one class, {next(iter(present(each)))}: a classifier needs at least two."
    for split, each in labeled.items():
        single = [name for name, count in present(each).items() if count == 1]
        small = [name for name, count in present(each).items() if 1 < count < MIN_CLASS_IMAGES]
        if single and split == "train":
            lost = "" if "validation" in report.splits else ", so that none is left for validation"
            yield f"{pluralize(len(single), 'class')} of {split} with a single image{lost}: {_list(single)}."
        if small and split == "train":
            yield f"{pluralize(len(small), 'class')} of {split} with fewer than {MIN_CLASS_IMAGES} images: {_list(small)}."
        if imbalance(each) > MAX_IMBALANCE:
            yield f"The largest class of {split} has {imbalance(each):,.0f} times as many images as the smallest."
        empty = [name for name, count in (each.classes or {}).items() if not count]
        if empty and len(labeled) == 1 and not each.defects:
            yield f"{pluralize(len(empty), 'class')} without an image: {_list(empty)}."
    if len(labeled) > 1:
        all_classes = {name for each in labeled.values() for name in each.classes or {}}
        for split, each in labeled.items():
            missing = sorted(all_classes - set(present(each)))
            if missing:
                yield f"{pluralize(len(missing), 'class')} without an image in {split}: {_list(missing)}."
        for split in labeled:
            others = {name for other, each in labeled.items() if other != split for name in present(each)}
            unique = sorted(set(present(labeled[split])) - others)
            if unique and len(labeled) > 2:
                yield f"{pluralize(len(unique), 'class')} only in {split}: {_list(unique)}."


def common_size(split: SplitReport) -> tuple[int, int] | None:
    """Return (width, height) if all images have the same size, else None."""
    ends = [(values[0], values[-1]) for name, values in split.resolution.items() if name in ("width", "height")]
    return (round(ends[0][0]), round(ends[1][0])) if ends and all(low == high for low, high in ends) else None


def present(split: SplitReport) -> dict[str, int]:
    """Return the classes with images, smallest first."""
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


def _shares(formats: dict[str, int], total: int) -> str:
    names = list(formats)
    if len(names) == 1:
        return names[0]
    rest = sum(formats[name] for name in names[3:])
    shares = [f"{name} {percent_of(formats[name], total)}" for name in names[:3]]
    return "\n".join(shares + ([f"others {percent_of(rest, total)}"] if rest else []))


def _list(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED:,} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def percent_of(part: int, total: int) -> str:
    """Format a percentage; it is 0 % or 100 % only if it is exactly that."""
    value = 100 * part / total if total else 0.0
    if 0 < value < 0.01:
        return "< 0.01 %"
    if 99.9 < value < 100:
        return "> 99.9 %"
    return f"{value:.2g} %" if value < 1 else f"{value:.3g} %"


def shorten(location: str, source: str) -> str:
    """Remove the path that the user typed from a location."""
    return location.replace(source.rstrip("/") + "/", "")
