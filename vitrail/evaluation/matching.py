"""Which of a model's classes is which class of the data: by equal lists, by name, by WordNet id, or as a file says."""

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import UserError

Among = Literal["subset", "all"]
WORDNET = re.compile(r"(?<![a-z0-9])n\d{8}(?!\d)")
STANDARD = 0.9  # of 1000 names that must stand in ImageNet's order to make them ImageNet's; releases spell some differently
SHOWN = 3
OTHER = "(another class)"


class Matching(NamedTuple):
    """What is asked of a model about data: `names` are the T possible answers.

    Data classes that the model does not tell apart are one answer; one answer may be several of the model's classes.
    """

    names: list[str]  # [T]
    groups: list[list[int]]  # [T]: the model's classes that are the answer
    answer: np.ndarray  # [classes of the data]: the right answer, -1 where pictures of the class are left out
    classes: int  # of the model
    how: str  # in words

    @property
    def whole(self) -> bool:
        """Whether every class of the model is an answer."""
        return sum(map(len, self.groups)) == self.classes

    def scores(self, logits: Tensor, among: Among = "subset") -> Tensor:
        """[B, classes of the model] to [B, T], or [B, T + the model's other classes] for "all".

        Several classes that are one answer add their probabilities.
        """
        found = self._joined(logits)
        if among == "subset" or self.whole:
            return found
        rest = np.setdiff1d(np.arange(self.classes), [place for group in self.groups for place in group])
        return torch.cat([found, logits[:, torch.from_numpy(rest).to(logits.device)]], 1)

    def _joined(self, logits: Tensor) -> Tensor:
        largest = max(map(len, self.groups))
        if self.groups == [[place] for place in range(logits.shape[1])]:
            return logits
        table = torch.tensor([group + [logits.shape[1]] * (largest - len(group)) for group in self.groups], device=logits.device)
        if largest == 1:
            return logits[:, table[:, 0]]
        padded = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)
        return padded[:, table].logsumexp(2)


@cache
def imagenet() -> list[tuple[str, str]]:
    """ImageNet-1k in its usual order: WordNet id and names ("tench, Tinca tinca") of each class."""
    lines = Path(__file__).with_name("imagenet.txt").read_text(encoding="utf-8").splitlines()
    return [(number, names) for number, names in (line.split("\t") for line in lines)]


def match(
    names: Sequence[str] | None,
    classes: int,
    wanted: Sequence[str],
    data: str = "the data",
    chosen: Mapping[str, Any] | None = None,
    ids: Mapping[str, str] | None = None,
) -> Matching:
    """The model's classes (`names`, or only their number) for each of the `wanted` ones of the data.

    `chosen` says for some classes of the data which of the model's they are, by name, WordNet id or number, one or a list;
    none (null or an empty list) leaves the class out. What it does not say is found by name. `ids` are WordNet ids of classes of
    the data, which tell one crane from the other.
    """
    if not classes:
        raise UserError("This model has no classifier: it cannot be asked for classes.")
    if not wanted:
        raise UserError(f"{data} has no classes: put the pictures into one folder per class, or give a table with a label.")
    own = list(names) if names is not None else [number for number, _ in imagenet()] if classes == len(imagenet()) else None
    if chosen is not None:
        return _as_chosen(own, names, classes, wanted, data, chosen, ids or {})
    if names is not None and list(names) == list(wanted):
        return _plain(wanted, range(classes), classes, "the same classes")
    numbered = [str(place) for place in range(len(wanted))]
    if classes == len(wanted) and (own is None or list(wanted) == numbered):
        silent = "the model" if own is None else data
        return _plain(wanted, range(classes), classes, f"in the order given, for {silent} has no class names")
    if own is None:
        raise UserError(
            f"The model has {classes} classes without names and {data} has {len(wanted)} ({_some(wanted)}): "
            f"say which is which with --map map.json."
        )
    places, how = _by_name(own, wanted, ids or {})
    lost = [place for place, found in enumerate(places) if found is None]
    if lost:
        raise UserError(_difference(own, names, wanted, lost, data))
    found = [place for place in places if place is not None]
    twice = next((place for place in found if found.count(place) > 1), None)
    if twice is not None:
        both = [wanted[row] for row, place in enumerate(found) if place == twice]
        raise UserError(
            f"{both[0]!r} and {both[1]!r} of {data} are both called like the model's class {_called(own, names, twice)!r}: "
            f"say which is which with --map map.json."
        )
    return _plain(wanted, found, classes, how)


def read_ids(path: str) -> dict[str, str]:
    """WordNet ids of class names where a data set keeps them beside its files, in wordnet_ids.json; {} where it does not."""
    here = Path(path).expanduser()
    try:
        content = json.loads(((here if here.is_dir() else here.parent) / "wordnet_ids.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    pairs = content.items() if isinstance(content, dict) else ()
    return {name: value for name, value in pairs if isinstance(value, str) and WORDNET.fullmatch(value)}


def read_map(path: str | Path) -> dict[str, Any]:
    """{class of the data: class or classes of the model} from a JSON file."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"There is no file {path}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(content, dict) or not content:
        raise UserError(f'{path} is not a map: write {{"class of the data": "class of the model" or a list of them, …}}.')
    return content


def _plain(wanted: Sequence[str], places: Sequence[int], classes: int, how: str) -> Matching:
    return Matching(list(wanted), [[place] for place in places], np.arange(len(wanted)), classes, how)


def _as_chosen(
    own: list[str] | None,
    names: Sequence[str] | None,
    classes: int,
    wanted: Sequence[str],
    data: str,
    chosen: Mapping[str, Any],
    ids: Mapping[str, str],
) -> Matching:
    unknown = next((name for name in chosen if name not in wanted), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, wanted, 1, 0.0)
        raise UserError(f"The map names {unknown!r}, which is no class of {data}; the nearest is {near[0]!r}.")
    places, _ = _by_name(own, wanted, ids) if own is not None else ([None] * len(wanted), "")
    groups: list[list[int]] = []
    for name, place in zip(wanted, places, strict=True):
        if name in chosen:
            value = chosen[name]
            several = value if isinstance(value, list) else [] if value is None else [value]
            groups.append(sorted({_one(own, classes, each, name) for each in several}))
        elif place is not None:
            groups.append([place])
        else:
            raise UserError(f"The map does not name {name!r} of {data}, and no class of the model is called so: add it.")
    return _merged(wanted, groups, own, names, classes)


def _merged(
    wanted: Sequence[str], groups: list[list[int]], own: list[str] | None, names: Sequence[str] | None, classes: int
) -> Matching:
    """Equal groups become one answer; those that overlap have none."""
    members: dict[tuple[int, ...], list[str]] = {}
    for name, group in zip(wanted, groups, strict=True):
        if group:
            members.setdefault(tuple(group), []).append(name)
    if len(members) < 2:
        raise UserError("The map leaves fewer than two classes to tell apart: map more classes.")
    taken: dict[int, str] = {}
    for places, called in members.items():
        for place in places:
            if place in taken:
                raise UserError(
                    f"The map gives the model's class {_called(own, names, place)!r} to {taken[place]!r} and to {called[0]!r}, "
                    f"whose other classes differ: give each of the model's classes to one group only."
                )
            taken[place] = called[0]
    keys = list(members)
    answer = np.array([keys.index(tuple(group)) if group else -1 for group in groups], dtype=np.int64)
    titles = [" / ".join(called) for called in members.values()]
    left = sum(not group for group in groups)
    how = "as the map says" + (f", {left} of the data's {len(wanted)} classes left out" if left else "")
    return Matching(titles, [list(key) for key in keys], answer, classes, how)


def _one(own: list[str] | None, classes: int, value: Any, name: str) -> int:
    """The number of a model's class that a map gives by number, name or WordNet id."""
    if type(value) is int:
        if not 0 <= value < classes:
            raise UserError(f"The map gives {name!r} the class number {value}; the model has 0 to {classes - 1}.")
        return value
    if not isinstance(value, str):
        raise UserError(f"The map gives {name!r} the value {value!r}: write a class name, a number or a list of them.")
    if own is None:
        raise UserError(f"The map gives {name!r} the class {value!r}, but the model's classes have no names: give numbers.")
    found = _by_name(own, [value], {})[0][0]
    if found is None:
        titles = [title for _, title in imagenet()] if own == [number for number, _ in imagenet()] else own
        near = difflib.get_close_matches(value, titles, 1, 0.0)
        raise UserError(f"The map gives {name!r} the class {value!r}, which the model does not have; the nearest is {near[0]!r}.")
    return found


def _by_name(own: Sequence[str], wanted: Sequence[str], ids: Mapping[str, str]) -> tuple[list[int | None], str]:
    """For each wanted class the one of ours that is called so, the surest kind of name first; and which kinds it took."""
    ours, theirs = _known(own), _known(wanted)
    if ours is not None and theirs is not None:
        return list(range(len(ours))), "ImageNet's classes in the usual order"
    if theirs is None and ids:
        theirs = [f"{ids[name]} {name}" if name in ids else name for name in wanted]
    rows: list[int | None] = [None] * len(wanted)
    used = []
    for title, keys in KINDS:
        places: dict[str, set[int]] = {}
        for place, name in enumerate(own):
            for key in keys(ours[place] if ours is not None else name):
                places.setdefault(key, set()).add(place)
        before = sum(row is not None for row in rows)
        for row, name in enumerate(wanted):
            if rows[row] is None:
                found = {place for key in keys(theirs[row] if theirs is not None else name) for place in places.get(key, ())}
                if len(found) == 1:
                    rows[row] = found.pop()
        if sum(row is not None for row in rows) > before:
            used.append(title)
    return rows, "by " + " and ".join(used)


def _known(names: Sequence[str]) -> list[str] | None:
    """ImageNet's ids and names if that is what these are, in its order; releases without ids spell some names alike."""
    table = imagenet()
    if len(names) != len(table):
        return None
    same = sum(number in name or _first(names_) in _first(name) for name, (number, names_) in zip(names, table, strict=True))
    return [f"{number} {names_}" for number, names_ in table] if same >= STANDARD * len(table) else None


def _plain_words(name: str) -> str:
    return " ".join(re.split(r"[\s_-]+", WORDNET.sub(" ", name.lower()))).strip()


def _first(name: str) -> str:
    return _plain_words(name.split(",")[0])


def _ids(name: str) -> Iterator[str]:
    yield from WORDNET.findall(name.lower())


def _all_lemmas(name: str) -> Iterator[str]:
    yield from filter(None, map(_plain_words, name.split(",")))


def _identical(name: str) -> Iterator[str]:
    yield name


def _whole(name: str) -> Iterator[str]:
    yield from filter(None, [_plain_words(name)])


def _first_lemma(name: str) -> Iterator[str]:
    yield from filter(None, [_first(name)])


KINDS: tuple[tuple[str, Callable[[str], Iterator[str]]], ...] = (
    ("name", _identical),
    ("WordNet id", _ids),
    ("name in small letters", _whole),
    ("first name", _first_lemma),
    ("one of their names", _all_lemmas),
)


def _difference(own: list[str], names: Sequence[str] | None, wanted: Sequence[str], lost: list[int], data: str) -> str:
    model = [title for _, title in imagenet()] if names is None else list(names)
    found = {place for place in _by_name(own, wanted, {})[0] if place is not None}
    spare = [model[place] for place in range(len(model)) if place not in found]
    only = [wanted[place] for place in lost]
    alike = next(((name, same) for name in only if len(same := _namesakes(name, model)) > 1), None)
    if alike is not None:
        return (
            f"{alike[0]!r} of {data} is the name of several of the model's classes, numbers {alike[1][0]} and {alike[1][1]}: "
            f"say which with --map map.json."
        )
    return (
        f"The model's {len(model)} classes are not those of {data}: unknown to the model are {len(lost)} of {len(wanted)} "
        f"({_some(only)}), while it has {_some(spare)}; say which is which with --map map.json."
    )


def _namesakes(name: str, model: Sequence[str]) -> list[int]:
    return [place for place, title in enumerate(model) if _first(name) in _all_lemmas(title)]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:SHOWN])
    return (shown + (", …" if len(names) > SHOWN else "")) if names else "no others"


def _called(own: list[str] | None, names: Sequence[str] | None, place: int) -> str:
    if names is not None:
        return names[place]
    return imagenet()[place][1] if own is not None else f"class {place}"
