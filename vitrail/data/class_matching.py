"""Matching of a model's classes with those of a data set: by equal lists, by name, by WordNet id, or by a given map."""

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.datasets.folder import SPLITS
from vitrail.errors import UserError
from vitrail.json_files import read_json

Among = Literal["subset", "all"]
WORDNET_ID = re.compile(r"(?<![a-z0-9])n\d{8}(?!\d)")
MIN_IMAGENET = 0.9  # share of 1000 names in ImageNet's order that makes a list ImageNet's; releases differ in some names
SHOWN = 3  # class names in a message
SHOWN_CHARACTERS = 100  # of a value of a map
OTHER = "(another class)"
HINT = "map the classes with --map map.json"


class ClassMatch(NamedTuple):
    """The T target classes that model and data have in common.

    Data classes that the model does not distinguish share one target; a target may consist of several model classes.
    """

    names: list[str]  # [T]
    groups: list[list[int]]  # [T]: indices of the model classes of each target
    targets: np.ndarray  # [data classes]: index of the target, -1 for classes that are excluded
    model_classes: int
    method: str  # for messages

    @property
    def complete(self) -> bool:
        """Whether every class of the model belongs to a target."""
        return sum(map(len, self.groups)) == self.model_classes

    def scores(self, logits: Tensor, among: Among = "subset") -> Tensor:
        """[B, model classes] to [B, T], or to [B, T + other model classes] with `among="all"`.

        The probabilities of the model classes of one target are added.
        """
        scores = self._target_scores(logits)
        if among == "subset" or self.complete:
            return scores
        others = np.setdiff1d(np.arange(self.model_classes), [index for group in self.groups for index in group])
        return torch.cat([scores, logits[:, torch.from_numpy(others).to(logits.device)]], 1)

    def _target_scores(self, logits: Tensor) -> Tensor:
        largest = max(map(len, self.groups))
        if self.groups == [[index] for index in range(logits.shape[1])]:
            return logits
        table = torch.tensor([group + [logits.shape[1]] * (largest - len(group)) for group in self.groups], device=logits.device)
        if largest == 1:
            return logits[:, table[:, 0]]
        padded = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)
        return padded[:, table].logsumexp(2)


@cache
def imagenet() -> list[tuple[str, str]]:
    """WordNet id and names ("tench, Tinca tinca") of the classes of ImageNet-1k in the standard order."""
    lines = Path(__file__).with_name("imagenet.txt").read_text(encoding="utf-8").splitlines()
    return [(number, names) for number, names in (line.split("\t") for line in lines)]


@cache
def imagenet_titles() -> list[str]:
    """The first synonym of each class of ImageNet-1k, with the WordNet id where two classes share it ("crane", "maillot")."""
    first = [synonyms.split(", ")[0] for _, synonyms in imagenet()]
    count = Counter(first)
    return [name if count[name] == 1 else f"{name} ({number})" for name, (number, _) in zip(first, imagenet(), strict=True)]


def class_titles(names: Sequence[str] | None, classes: int) -> list[str]:
    """Class names to show: those of the model; ImageNet's for 1000 classes without names; otherwise "class 7"."""
    if names is not None:
        return list(names)
    return imagenet_titles() if classes == len(imagenet()) else [f"class {index}" for index in range(classes)]


def match_classes(
    model_names: Sequence[str] | None,
    model_classes: int,
    data_names: Sequence[str],
    data: str = "the data",
    class_map: Mapping[str, Any] | None = None,
    ids: Mapping[str, str] | None = None,
    hint: str = HINT,
) -> ClassMatch:
    """The model classes of each class of the data; UserError if a class of the data has none.

    `class_map` maps classes of the data to one model class or a list of them, by name, WordNet id or index; null or an empty
    list excludes the class. Classes that are not in the map are matched by name. `ids` are WordNet ids of classes of the data,
    which resolve ambiguous names. `data` and `hint` are used in error messages: the name of the data, and what to do.
    """
    if not model_classes:
        raise UserError("This model has no classifier: it cannot predict classes.")
    if not data_names:
        raise UserError(f"{data} has no classes: put the images into one folder per class, or give a table with a label.")
    known = list(model_names) if model_names is not None else None
    if known is None and model_classes == len(imagenet()):
        known = [number for number, _ in imagenet()]
    if class_map is not None:
        return _apply_map(known, model_names, model_classes, data_names, data, class_map, ids or {})
    if model_names is not None and list(model_names) == list(data_names):
        return _one_to_one(data_names, range(model_classes), model_classes, "the same classes")
    numbers = _class_numbers(data_names)
    if known is None and numbers is not None and max(numbers) < model_classes:
        return _one_to_one(data_names, numbers, model_classes, f"by index, since the classes of {data} are numbers")
    if known is not None and numbers == list(range(model_classes)) and set(known).isdisjoint(data_names):
        return _one_to_one(data_names, numbers, model_classes, f"by index, since {data} has no class names")
    if known is None and model_classes == len(data_names):
        return _one_to_one(data_names, range(model_classes), model_classes, "by index, since the model has no class names")
    if known is None:
        raise UserError(
            f"The model has {model_classes} classes without names and {data} has {len(data_names)} ({_some(data_names)}): {hint}."
        )
    indices, method = _match_names(known, data_names, ids or {})
    missing = [row for row, index in enumerate(indices) if index is None]
    if missing:
        raise UserError(_describe_difference(known, model_names, data_names, missing, data, hint))
    matched = [index for index in indices if index is not None]
    duplicate = next((index for index in matched if matched.count(index) > 1), None)
    if duplicate is not None:
        own = class_titles(model_names, model_classes)
        both = [data_names[row] for row, index in enumerate(matched) if index == duplicate]
        raise UserError(f"{both[0]!r} and {both[1]!r} of {data} both match the model's class {own[duplicate]!r}: {hint}.")
    return _one_to_one(data_names, matched, model_classes, method)


def read_wordnet_ids(path: str) -> dict[str, str]:
    """WordNet ids by class name from wordnet_ids.json in the folder of a data set; {} without such a file."""
    location = Path(path).expanduser()
    folder = location if location.is_dir() else location.parent
    folders = [folder, folder.parent] if folder.name.lower() in SPLITS else [folder]
    file = next(filter(Path.is_file, (each / "wordnet_ids.json" for each in folders)), None)
    try:
        content = read_json(file) if file is not None else None
    except UserError:
        return {}
    pairs = content.items() if isinstance(content, dict) else ()
    return {name: value for name, value in pairs if isinstance(value, str) and WORDNET_ID.fullmatch(value)}


def read_class_map(path: str | Path) -> dict[str, Any]:
    """{class of the data: class or classes of the model} from a JSON file."""
    content = read_json(path)
    if not isinstance(content, dict) or not content:
        raise UserError(f'{path} is not a class map: write {{"class of the data": "class of the model" or a list of them, …}}.')
    return content


def _class_numbers(names: Sequence[str]) -> list[int] | None:
    """The numbers that are the names of the classes; None if a name is not a number or two are the same number."""
    if not all(name.isascii() and name.isdigit() and len(name) < 10 for name in names):
        return None
    numbers = [int(name) for name in names]
    return numbers if len(set(numbers)) == len(numbers) else None


def _one_to_one(data_names: Sequence[str], indices: Sequence[int], model_classes: int, method: str) -> ClassMatch:
    return ClassMatch(list(data_names), [[index] for index in indices], np.arange(len(data_names)), model_classes, method)


def _apply_map(
    known: list[str] | None,
    model_names: Sequence[str] | None,
    model_classes: int,
    data_names: Sequence[str],
    data: str,
    class_map: Mapping[str, Any],
    ids: Mapping[str, str],
) -> ClassMatch:
    unknown = next((name for name in class_map if name not in data_names), None)
    if unknown is not None:
        nearest = difflib.get_close_matches(unknown[:SHOWN_CHARACTERS], data_names, 1, 0.0)
        raise UserError(f"The map names {_shorten(unknown)}, which is no class of {data}; the nearest is {nearest[0]!r}.")
    indices, _ = _match_names(known, data_names, ids) if known is not None else ([None] * len(data_names), "")
    groups: list[list[int]] = []
    for name, index in zip(data_names, indices, strict=True):
        if name in class_map:
            value = class_map[name]
            values = value if isinstance(value, list) else [] if value is None else [value]
            groups.append(sorted({_mapped_index(known, model_classes, each, name) for each in values}))
        elif index is not None:
            groups.append([index])
        else:
            raise UserError(f"The map does not contain {name!r} of {data}, and the model has no class of this name: add it.")
    return _merge_equal(data_names, groups, known, model_names, model_classes)


def _merge_equal(
    data_names: Sequence[str],
    groups: list[list[int]],
    known: list[str] | None,
    model_names: Sequence[str] | None,
    model_classes: int,
) -> ClassMatch:
    """Data classes with equal groups become one target; overlapping groups raise UserError."""
    members: dict[tuple[int, ...], list[str]] = {}
    for name, group in zip(data_names, groups, strict=True):
        if group:
            members.setdefault(tuple(group), []).append(name)
    if len(members) < 2:
        raise UserError("The map leaves fewer than two classes: map more classes.")
    owner: dict[int, str] = {}
    for indices, names in members.items():
        for index in indices:
            if index in owner:
                own = class_titles(model_names, model_classes)
                raise UserError(
                    f"The map assigns the model's class {own[index]!r} to {owner[index]!r} and to "
                    f"{names[0]!r}, whose other classes differ: assign each of the model's classes to one group only."
                )
            owner[index] = names[0]
    keys = list(members)
    targets = np.array([keys.index(tuple(group)) if group else -1 for group in groups], dtype=np.int64)
    titles = [" / ".join(names) for names in members.values()]
    excluded = sum(not group for group in groups)
    method = "by the map" + (f", {excluded} of the data's {len(data_names)} classes excluded" if excluded else "")
    return ClassMatch(titles, [list(key) for key in keys], targets, model_classes, method)


def _mapped_index(known: list[str] | None, model_classes: int, value: Any, name: str) -> int:
    """The index of a model class given by index, name or WordNet id."""
    if type(value) is int:
        if not 0 <= value < model_classes:
            raise UserError(
                f"The map assigns the class index {_shorten(value)} to {name!r}; the model has 0 to {model_classes - 1}."
            )
        return value
    if not isinstance(value, str):
        raise UserError(
            f"The map assigns the value {_shorten(value)} to {name!r}: write a class name, an index or a list of them."
        )
    if known is None:
        raise UserError(
            f"The map assigns the class {_shorten(value)} to {name!r}, but the model has no class names: give indices."
        )
    index = _match_names(known, [value], {})[0][0]
    if index is None:
        titles = [title for _, title in imagenet()] if known == [number for number, _ in imagenet()] else known
        nearest = difflib.get_close_matches(value[:SHOWN_CHARACTERS], titles, 1, 0.0)
        raise UserError(
            f"The map assigns the class {_shorten(value)} to {name!r}, which the model does not have; "
            f"the nearest is {nearest[0]!r}."
        )
    return index


def _match_names(known: Sequence[str], data_names: Sequence[str], ids: Mapping[str, str]) -> tuple[list[int | None], str]:
    """The model class of each class of the data (None: no match), by the most reliable kind of name first; and how they matched.

    A list that is ImageNet's is also matched by ImageNet's table of names, after its own names.
    """
    model_table, data_table = _imagenet_entries(known), _imagenet_entries(data_names)
    with_ids = [f"{ids[name]} {name}" if name in ids else name for name in data_names]
    rows: list[int | None] = [None] * len(data_names)
    used: list[str] = []
    _match_by(
        ("WordNet id", _wordnet_ids),
        _add_certain_ids(known, known, model_table),
        _add_certain_ids(data_names, with_ids, data_table),
        rows,
        used,
    )
    _match_by(("name", _identical), known, data_names, rows, used)
    if model_table is not None and data_table is not None:
        taken = set(rows)
        completed = [index if row is None and index not in taken else row for index, row in enumerate(rows)]
        standard = "ImageNet's classes in the standard order"
        return completed, standard if completed == list(
            range(len(rows))
        ) else f"by {' and '.join(used)}, the others as {standard}"
    for kind in KINDS:
        _match_by(kind, known, with_ids, rows, used)
    if model_table is not None or data_table is not None:
        for kind in (("WordNet id", _wordnet_ids), *KINDS):
            _match_by(kind, model_table or known, data_table or with_ids, rows, used)
    return rows, "by " + " and ".join(used)


def _match_by(kind: "Kind", known: Sequence[str], data_names: Sequence[str], rows: list[int | None], used: list[str]) -> None:
    """Fill the open rows that one kind of name matches without ambiguity, and append the kind to `used` if there are any."""
    title, keys = kind
    indices: dict[str, set[int]] = {}
    for index, name in enumerate(known):
        for key in keys(name):
            indices.setdefault(key, set()).add(index)
    for row, name in enumerate(data_names):
        if rows[row] is None:
            candidates = {index for key in keys(name) for index in indices.get(key, ())}
            if len(candidates) == 1:
                rows[row] = candidates.pop()
                if title not in used:
                    used.append(title)


def _imagenet_entries(names: Sequence[str]) -> list[str] | None:
    """ImageNet's ids and names if the list is ImageNet's in the standard order; releases without ids differ in some names."""
    table = imagenet()
    if len(names) != len(table):
        return None
    equal = sum(map(_same_class, names, table))
    return [f"{number} {names_}" for number, names_ in table] if equal >= MIN_IMAGENET * len(table) else None


def _same_class(name: str, entry: tuple[str, str]) -> bool:
    number, names = entry
    return number in name or _first_name(names) in _first_name(name)


def _add_certain_ids(names: Sequence[str], with_ids: Sequence[str], table: list[str] | None) -> list[str]:
    """Names with their certain WordNet ids: those given, and those of ImageNet's table where the names agree."""
    if table is None:
        return list(with_ids)
    return [
        entry if text == name and _same_class(name, pair) else text
        for name, text, entry, pair in zip(names, with_ids, table, imagenet(), strict=True)
    ]


def _normalize(name: str) -> str:
    return " ".join(re.split(r"[\s_-]+", WORDNET_ID.sub(" ", name.lower()))).strip()


def _first_name(name: str) -> str:
    return _normalize(name.split(",")[0])


# Each of these yields the keys by which a name is compared.
def _wordnet_ids(name: str) -> Iterator[str]:
    yield from WORDNET_ID.findall(name.lower())


def _identical(name: str) -> Iterator[str]:
    yield name


def _normalized(name: str) -> Iterator[str]:
    yield from filter(None, [_normalize(name)])


def _first_of_names(name: str) -> Iterator[str]:
    yield from filter(None, [_first_name(name)])


def _all_names(name: str) -> Iterator[str]:
    yield from filter(None, map(_normalize, name.split(",")))


Kind = tuple[str, Callable[[str], Iterator[str]]]
KINDS: tuple[Kind, ...] = (
    ("normalized name", _normalized),
    ("first name", _first_of_names),
    ("one of the names", _all_names),
)


def _describe_difference(
    known: list[str],
    model_names: Sequence[str] | None,
    data_names: Sequence[str],
    missing: list[int],
    data: str,
    hint: str,
) -> str:
    titles = [title for _, title in imagenet()] if model_names is None else list(model_names)
    matched = {index for index in _match_names(known, data_names, {})[0] if index is not None}
    unmatched = [titles[index] for index in range(len(titles)) if index not in matched]
    names = [data_names[row] for row in missing]
    for name in names:
        same = [index for index, title in enumerate(titles) if _first_name(name) in _all_names(title)]
        if len(same) > 1:
            return f"{name!r} of {data} is the name of several classes of the model, indices {same[0]} and {same[1]}: {hint}."
    return (
        f"The model's {len(titles)} classes do not match those of {data}: {len(missing)} of {len(data_names)} are unknown to the "
        f"model ({_some(names)}); the model has {_some(unmatched)}; {hint}."
    )


def _shorten(value: Any) -> str:
    """A value of a map for a message; it may have any length."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:SHOWN])
    return (shown + (", …" if len(names) > SHOWN else "")) if names else "no others"
