"""Words of a command that are empty, as scripts hand them on from variables that are not set."""

import shlex

import pytest

from vitrail.cli.main import check_words


@pytest.mark.parametrize(
    "words",
    [
        *(["train", "digits", option, "", "--out", "run"] for option in ("--from", "--model", "--teacher")),
        ["train", "digits", "--seed=", "--out", "run"],
        ["train", "digits", "--labels= ", "--out", "run"],
        ["train", "digits", "--out", ""],
        ["evaluate", "vitrail_tiny", "digits", "--out="],
        ["bench", "vitrail_mini", "--plot", ""],
    ],
)
def test_a_variable_that_is_not_set(words, refused, tmp_path, monkeypatch):
    """An empty --from would train from scratch without a word, an empty --out into the current folder."""
    monkeypatch.chdir(tmp_path)
    empty = words[words.index("") - 1] if "" in words else next(word for word in words if "=" in word).partition("=")[0]
    assert refused(*words) == f"{empty} is empty: give what it should be, or leave it out."
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("train", []),
        ("data pack digits", []),
        ("convert", ["out.safetensors"]),
        ("evaluate", ["digits"]),
        ("predict 'my weights'", []),
        ("probe knn vitrail_tiny", []),
        ("", []),
    ],
)
def test_an_empty_argument(before, after, refused, tmp_path, monkeypatch):
    """It would be the current folder, to read from or to write into."""
    monkeypatch.chdir(tmp_path)
    said = refused(*shlex.split(before), "", *after)
    assert said == f"What follows `{f'vitrail {before}'.strip()}` is empty: give what should stand there, or leave it out."
    assert not list(tmp_path.iterdir())


def test_values_that_end_with_an_equals_sign_are_not_empty():
    check_words(["train", "--set=init.weights=", "--set", "init.weights=", "--shard", "a=", "="])
