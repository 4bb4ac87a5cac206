"""Empty arguments, as from unset shell variables, are rejected."""

import shlex

import pytest

from vitrail.cli.main import reject_empty_arguments


@pytest.mark.parametrize(
    "arguments",
    [
        *(["train", "digits", option, "", "--out", "run"] for option in ("--from", "--model", "--teacher")),
        ["train", "digits", "--seed=", "--out", "run"],
        ["train", "digits", "--labels= ", "--out", "run"],
        ["train", "digits", "--out", ""],
        ["evaluate", "vitrail_tiny", "digits", "--out="],
        ["bench", "vitrail_mini", "--plot", ""],
    ],
)
def test_empty_option_values_are_rejected(arguments, cli_error, tmp_path, monkeypatch):
    """An empty --from would train from scratch without a message, an empty --out into the current folder."""
    monkeypatch.chdir(tmp_path)
    empty = (
        arguments[arguments.index("") - 1]
        if "" in arguments
        else next(argument for argument in arguments if "=" in argument).partition("=")[0]
    )
    assert cli_error(*arguments) == f"{empty} is empty: give a value, or remove it."
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
def test_empty_arguments_are_rejected(before, after, cli_error, tmp_path, monkeypatch):
    """It would be the current folder, to read from or to write into."""
    monkeypatch.chdir(tmp_path)
    message = cli_error(*shlex.split(before), "", *after)
    assert message == f"The argument after `{f'vitrail {before}'.strip()}` is empty: give a value, or remove it."
    assert not list(tmp_path.iterdir())


def test_values_that_end_with_an_equals_sign_are_not_empty():
    reject_empty_arguments(["train", "--set=init.weights=", "--set", "init.weights=", "--shard", "a=", "="])
