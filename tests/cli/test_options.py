"""Option groups: NamedTuples whose fields are options of a command."""

import inspect
from typing import NamedTuple

from vitrail.cli.options import expand_options


class Inner(NamedTuple):
    device: str | None = None
    batch_size: int = 64


class Outer(NamedTuple):
    seed: int = 0
    inner: Inner = Inner(batch_size=32)


def test_fields_of_nested_groups_become_parameters():
    calls = []

    @expand_options
    def command(path: str, top: int = 5, *, outer: Outer, as_json: bool = False) -> None:
        """Help text."""
        calls.append((path, top, outer, as_json))

    parameters = inspect.signature(command).parameters
    assert list(parameters) == ["path", "top", "seed", "device", "batch_size", "as_json"]
    assert parameters["batch_size"].default == 32  # the default of the group
    assert command.__doc__ == "Help text."
    command("weights", seed=3, device="cpu")
    assert calls == [("weights", 5, Outer(3, Inner("cpu", 32)), False)]
