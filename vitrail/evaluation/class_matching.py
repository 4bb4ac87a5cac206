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

from vitrail.data.datasets.folder import SPLITS
from vitrail.errors import UserError

Among = Literal["subset", "all"]
WORDNET = re.compile(r"(?<![a-z0-9])n\d{8}(?!\d)")
STANDARD = 0.9  # of 1000 names that must stand in ImageNet's order to make them ImageNet's; releases spell some differently
SHOWN = 3
OTHER = "(another class)"
ADVICE = "say which is which with --map map.json"


class Matching(NamedTuple):
    """What is asked of a model about data: `names` are the T possible answers.

    Data classes that the model does not tell apart are one answer; one answer may be several of the model's classes.
    """

    names: list[str]  # [T]
    groups: list[list[int]]  # [T]: the model's classes that are the answer
    answer: np.ndarray  # [classes of the data]: the right answer, -1 where images of the class are left out
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
    advice: str = ADVICE,
) -> Matching:
    """The model's classes (`names`, or only their number) for each of the `wanted` ones of the data.

    `chosen` says for some classes of the data which of the model's they are, by name, WordNet id or number, one or a list;
    none (null or an empty list) leaves the class out. What it does not say is found by name. `ids` are WordNet ids of classes of
    the data, which tell one crane from the other. `advice` is what a person can do here about classes that are not found.
    """
    if not classes:
        raise UserError("This model has no classifier: it cannot be asked for classes.")
    if not wanted:
        raise UserError(f"{data} has no classes: put the images into one folder per class, or give a table with a label.")
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
            f"The model has {classes} classes without names and {data} has {len(wanted)} ({_some(wanted)}): {advice}."
        )
    places, how = _by_name(own, wanted, ids or {})
    lost = [place for place, found in enumerate(places) if found is None]
    if lost:
        raise UserError(_difference(own, names, wanted, lost, data, advice))
    found = [place for place in places if place is not None]
    twice = next((place for place in found if found.count(place) > 1), None)
    if twice is not None:
        both = [wanted[row] for row, place in enumerate(found) if place == twice]
        raise UserError(
            f"{both[0]!r} and {both[1]!r} of {data} are both called like the model's class {_called(own, names, twice)!r}: "
            f"{advice}."
        )
    return _plain(wanted, found, classes, how)


def read_ids(path: str) -> dict[str, str]:
    """WordNet ids of class names where a data set keeps them beside its files, in wordnet_ids.json; {} where it does not."""
    here = Path(path).expanduser()
    folder = here if here.is_dir() else here.parent
    places = [folder, folder.parent] if folder.name.lower() in SPLITS else [folder]  # the folder of a split lies in the data's
    file = next(filter(Path.is_file, (place / "wordnet_ids.json" for place in places)), None)
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file is not None else None
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
    """For each wanted class the one of ours that is called so, the surest kind of name first; and which kinds it took.

    A list that is ImageNet's is also known by ImageNet's table, but what it calls its classes itself goes first.
    """
    ours, theirs = _known(own), _known(wanted)
    told = [f"{ids[name]} {name}" if name in ids else name for name in wanted]
    rows: list[int | None] = [None] * len(wanted)
    used: list[str] = []
    _look(("WordNet id", _ids), _certain(own, own, ours), _certain(wanted, told, theirs), rows, used)
    _look(("name", _identical), own, wanted, rows, used)
    if ours is not None and theirs is not None:
        taken = set(rows)
        rest = [place if row is None and place not in taken else row for place, row in enumerate(rows)]
        usual = "ImageNet's classes in the usual order"
        return rest, usual if rest == list(range(len(rest))) else f"by {' and '.join(used)}, the others as {usual}"
    for kind in KINDS:
        _look(kind, own, told, rows, used)
    if ours is not None or theirs is not None:
        for kind in (("WordNet id", _ids), *KINDS):
            _look(kind, ours or own, theirs or told, rows, used)
    return rows, "by " + " and ".join(used)


def _look(kind: "Kind", own: Sequence[str], wanted: Sequence[str], rows: list[int | None], used: list[str]) -> None:
    """Fill the rows still open where one kind of name leaves no doubt, and note that it helped."""
    title, keys = kind
    places: dict[str, set[int]] = {}
    for place, name in enumerate(own):
        for key in keys(name):
            places.setdefault(key, set()).add(place)
    for row, name in enumerate(wanted):
        if rows[row] is None:
            found = {place for key in keys(name) for place in places.get(key, ())}
            if len(found) == 1:
                rows[row] = found.pop()
                if title not in used:
                    used.append(title)


def _known(names: Sequence[str]) -> list[str] | None:
    """ImageNet's ids and names if that is what these are, in its order; releases without ids spell some names alike."""
    table = imagenet()
    if len(names) != len(table):
        return None
    same = sum(map(_agrees, names, table))
    return [f"{number} {names_}" for number, names_ in table] if same >= STANDARD * len(table) else None


def _agrees(name: str, entry: tuple[str, str]) -> bool:
    number, names = entry
    return number in name or _first(names) in _first(name)


def _certain(names: Sequence[str], told: Sequence[str], known: list[str] | None) -> list[str]:
    """Names with the WordNet ids that there is no doubt of: told, or the table's where list and table agree on a name."""
    if known is None:
        return list(told)
    return [
        entry if text == name and _agrees(name, pair) else text
        for name, text, entry, pair in zip(names, told, known, imagenet(), strict=True)
    ]


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


Kind = tuple[str, Callable[[str], Iterator[str]]]
KINDS: tuple[Kind, ...] = (
    ("name in small letters", _whole),
    ("first name", _first_lemma),
    ("one of their names", _all_lemmas),
)


def _difference(
    own: list[str], names: Sequence[str] | None, wanted: Sequence[str], lost: list[int], data: str, advice: str
) -> str:
    model = [title for _, title in imagenet()] if names is None else list(names)
    found = {place for place in _by_name(own, wanted, {})[0] if place is not None}
    spare = [model[place] for place in range(len(model)) if place not in found]
    only = [wanted[place] for place in lost]
    alike = next(((name, same) for name in only if len(same := _namesakes(name, model)) > 1), None)
    if alike is not None:
        return (
            f"{alike[0]!r} of {data} is the name of several of the model's classes, numbers {alike[1][0]} and {alike[1][1]}: "
            f"{advice}."
        )
    return (
        f"The model's {len(model)} classes are not those of {data}: unknown to the model are {len(lost)} of {len(wanted)} "
        f"({_some(only)}), while it has {_some(spare)}; {advice}."
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
