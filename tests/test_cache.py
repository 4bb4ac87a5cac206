"""The user's cache folder."""

from pathlib import Path

from vitrail.cache import cache_folder


def test_the_variables_that_choose_the_folder(monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert cache_folder("weights") == Path("/one/weights")
    monkeypatch.delenv("VITRAIL_CACHE")
    assert cache_folder("weights") == Path("/two/vitrail/weights")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/user")
    assert cache_folder("weights") == Path("/home/user/.cache/vitrail/weights")
