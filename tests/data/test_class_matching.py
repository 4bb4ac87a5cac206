"""Which class is which."""

import json

import numpy as np
import pytest
import torch

from vitrail.data.class_matching import class_titles, imagenet, match_classes, read_class_map, read_wordnet_ids
from vitrail.errors import UserError


def places(*arguments, **named):
    return [group[0] if len(group) == 1 else group for group in match_classes(*arguments, **named).groups]


def test_the_table_of_imagenet():
    table = imagenet()
    assert len(table) == len({number for number, _ in table}) == 1000
    assert [number for number, _ in table] == sorted(number for number, _ in table)
    for place, number, name in (
        (0, "n01440764", "tench, Tinca tinca"),
        (207, "n02099601", "golden retriever"),
        (281, "n02123045", "tabby, tabby cat"),
        (999, "n15075141", "toilet tissue, toilet paper, bathroom tissue"),
    ):
        assert table[place] == (number, name)


def test_names_to_show():
    assert class_titles(["cat"], 1) == ["cat"]
    assert class_titles(None, 2) == ["class 0", "class 1"]
    shown = class_titles(None, 1000)
    assert shown[0] == "tench"
    assert shown[281] == "tabby"
    assert shown[134] == "crane (n02012849)"  # the bird; 517 is the machine
    assert len(set(shown)) == 1000


def test_the_same_classes():
    found = match_classes(["a", "b"], 2, ["a", "b"])
    assert (found.groups, found.method, found.complete) == ([[0], [1]], "the same classes", True)
    logits = torch.randn(3, 2)
    assert found.scores(logits) is logits


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (["cat", "dog", "cow"], ["cow", "cat"], [2, 0]),
        (["Black Widow", "sea-slug"], ["sea_slug", "black_widow"], [1, 0]),
        (["tench, Tinca tinca", "goldfish, Carassius auratus"], ["Goldfish", "tench"], [1, 0]),
        (["tench, Tinca tinca", "cock"], ["tinca_tinca", "cock"], [0, 1]),
        (["n01440764", "n01443537"], ["n01443537 goldfish", "tench_n01440764"], [1, 0]),
        (["maillot", "maillot, tank suit"], ["maillot, tank suit", "maillot"], [1, 0]),
        (["a", "A"], ["A", "a"], [1, 0]),
        (["猫", "犬"], ["犬", "猫"], [1, 0]),
    ],
)
def test_by_name(ours, theirs, expected):
    assert places(ours, len(ours), theirs) == expected


def test_a_thousand_classes_without_names_are_imagenet():
    assert places(None, 1000, ["n02123045", "n01440764"]) == [281, 0]
    assert places(None, 1000, ["tabby", "goldfish", "European_fire_salamander"]) == [281, 1, 25]
    whole = match_classes(None, 1000, [number for number, _ in imagenet()])
    assert whole.groups == [[place] for place in range(1000)]
    assert match_classes(None, 1000, [str(place) for place in range(1000)]).method.startswith("by index")


def test_released_names_match_folders_of_wordnet_ids():
    names = [name for _, name in imagenet()]
    names[744] = "missile launcher"  # releases spell some differently
    assert places(names, 1000, ["n03126707", "n02012849"]) == [517, 134]  # the two cranes, told apart by their places
    assert match_classes(names, 1000, [number for number, _ in imagenet()]).method == "ImageNet's classes in the standard order"


def test_ambiguous_names_and_wordnet_ids(tmp_path):
    with pytest.raises(UserError, match="'crane' of Tiny is the name of several classes of the model, indices 134 and 517"):
        match_classes(None, 1000, ["crane", "goldfish"], "Tiny")
    assert places(None, 1000, ["crane", "goldfish"], ids={"crane": "n03126707"}) == [517, 1]
    assert places(None, 1000, ["crane", "goldfish"], class_map={"crane": "n02012849"}) == [134, 1]
    (tmp_path / "wordnet_ids.json").write_text('{"crane": "n03126707", "odd": 3, "wrong": "crane"}')
    assert read_wordnet_ids(str(tmp_path)) == read_wordnet_ids(str(tmp_path / "validation.parquet")) == {"crane": "n03126707"}
    (tmp_path / "wordnet_ids.json").write_text("[[[")
    assert read_wordnet_ids(str(tmp_path)) == read_wordnet_ids("digits") == {}


def test_own_names_take_precedence_over_imagenets():
    """A list that is nearly all ImageNet's, in which only one crane is called just that."""
    names = [name.split(",")[0] for _, name in imagenet()]
    names[134] = "crane bird"
    names[744] = "Launcher"
    assert places(names, 1000, ["crane", "goldfish", "n02012849", "launcher"]) == [517, 1, 134, 744]
    assert match_classes(names, 1000, ["crane", "goldfish"]).method == "by name"
    names[134], names[517] = "crane", "crane for building"
    assert places(names, 1000, ["crane", "goldfish"]) == [134, 1]
    assert places(names, 1000, ["crane", "goldfish"], ids={"crane": "n03126707"}) == [517, 1]  # an id leaves no doubt


def test_names_take_precedence_over_the_standard_order():
    names = [name for _, name in imagenet()]
    other = list(names)
    other[3], other[4] = other[4], other[3]
    other[744] = "missile launcher"
    found = match_classes(names, 1000, other)
    assert [group[0] for group in found.groups] == [0, 1, 2, 4, 3, *range(5, 1000)]
    assert found.method == "by WordNet id and name, the others as ImageNet's classes in the standard order"


def test_the_hint_is_in_the_message(tmp_path):
    for names, wanted in ((["a", "b", "c"], ["a", "x"]), (None, ["x", "y"]), (["cat, tom", "dog", "cow"], ["cat", "tom"])):
        with pytest.raises(UserError, match=r": ask a friend\.$|; ask a friend\.$") as raised:
            match_classes(names, 3, wanted, hint="ask a friend")
        assert "--map" not in str(raised.value)


def test_wordnet_ids_in_the_parent_of_a_split_folder(tmp_path):
    (tmp_path / "wordnet_ids.json").write_text('{"crane": "n03126707"}')
    (tmp_path / "train").mkdir()
    (tmp_path / "cranes").mkdir()
    assert read_wordnet_ids(str(tmp_path / "train")) == {"crane": "n03126707"}
    assert read_wordnet_ids(str(tmp_path / "cranes")) == {}
    (tmp_path / "train" / "wordnet_ids.json").write_text("{}")  # the nearest counts
    assert read_wordnet_ids(str(tmp_path / "train")) == {}


def test_differences_are_shown_from_both_sides():
    with pytest.raises(UserError) as raised:
        match_classes(["cat", "dog", "cow", "hen", "pig"], 5, ["cat", "whale", "shark", "eel", "ray"], "sea")
    assert str(raised.value) == (
        "The model's 5 classes do not match those of sea: 4 of 5 are unknown to the model ('whale', 'shark', 'eel', …); "
        "the model has 'dog', 'cow', 'hen', …; map the classes with --map map.json."
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, 0, ["a"]), "no classifier"),
        ((["a"], 1, []), "no classes"),
        ((None, 7, ["a", "b"]), "7 classes without names"),
        (
            (["cat, tom", "dog"], 2, ["cat", "tom"]),
            "'cat' and 'tom' of the data both match the model's class",
        ),
    ],
)
def test_classes_without_a_match(arguments, message):
    with pytest.raises(UserError, match=message):
        match_classes(*arguments)


def test_without_names_the_order_counts():
    found = match_classes(None, 2, ["a", "b"])
    assert (found.groups, found.method) == ([[0], [1]], "by index, since the model has no class names")


def test_a_subset_and_all_the_others():
    found = match_classes(["a", "b", "c", "d"], 4, ["d", "b"])
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert found.scores(logits).tolist() == [[4.0, 2.0]]
    assert found.scores(logits, "all").tolist() == [[4.0, 2.0, 1.0, 3.0]]


def test_several_classes_of_the_model_add_their_probabilities():
    found = match_classes(["tabby", "tiger", "pug", "boat"], 4, ["cat", "dog"], class_map={"cat": ["tabby", 1], "dog": "pug"})
    logits = torch.randn(5, 4, dtype=torch.float64)
    chances = logits.softmax(1)
    joined = found.scores(logits, "all").softmax(1)
    assert torch.allclose(joined, torch.stack([chances[:, 0] + chances[:, 1], chances[:, 2], chances[:, 3]], 1))
    among = found.scores(logits).softmax(1)
    assert torch.allclose(among[:, 0], (chances[:, 0] + chances[:, 1]) / chances[:, :3].sum(1))


def test_merged_and_excluded_classes_of_the_data():
    found = match_classes(
        ["cat", "dog"], 2, ["tabby", "siamese", "dog", "boat"], class_map={"tabby": "cat", "siamese": "cat", "boat": None}
    )
    assert found.names == ["tabby / siamese", "dog"]
    assert found.targets.tolist() == [0, 0, 1, -1]
    assert found.groups == [[0], [1]]
    assert "1 of the data's 4 classes excluded" in found.method
    assert found.targets.dtype == np.int64


@pytest.mark.parametrize(
    ("class_map", "message"),
    [
        ({"cot": "cat"}, "no class of the data; the nearest is 'cat'"),
        ({"cat": "tiger"}, "which the model does not have; the nearest is"),
        ({"cat": 9}, "class index 9 to 'cat'; the model has 0 to 2"),
        ({"cat": True}, "the value True"),
        ({"cat": {"a": 1}}, "write a class name"),
        ({"cat": ["cat", "dog"], "dog": "dog"}, "'dog' to 'cat' and to 'dog'"),
        ({"cat": None, "dog": []}, "fewer than two classes"),
    ],
)
def test_invalid_maps(class_map, message):
    with pytest.raises(UserError, match=message):
        match_classes(["cat", "dog", "cow"], 3, ["cat", "dog"], class_map=class_map)


def test_a_map_for_a_model_without_names():
    assert places(None, 7, ["a", "b"], class_map={"a": 3, "b": [5, 6]}) == [3, [5, 6]]
    with pytest.raises(UserError, match="the model has no class names: give indices"):
        match_classes(None, 7, ["a", "b"], class_map={"a": "x", "b": 1})
    with pytest.raises(UserError, match="does not contain 'b'"):
        match_classes(None, 7, ["a", "b"], class_map={"a": 3})


def test_invalid_map_files(tmp_path):
    path = tmp_path / "map.json"
    with pytest.raises(UserError, match="There is no file"):
        read_class_map(path)
    for text, words in (
        ("{", "cannot be read as JSON"),
        ("[1]", "is not a class map"),
        ("{}", "is not a class map"),
        ("[" * 99999, "JSON"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=words):
            read_class_map(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read"):
        read_class_map(path)
    path.write_text(json.dumps({"cat": ["a", 3]}))
    assert read_class_map(path) == {"cat": ["a", 3]}
