"""The compiler is loaded where something is compiled, not elsewhere: it takes longer than the rest of a command's start."""

import subprocess
import sys

import torch

from vitrail.layers import kernels
from vitrail.layers.kernels import constant, exporting, is_ampere


def test_a_constant_is_marked_as_torch_marks_it():
    def ours() -> bool:
        return True

    def theirs() -> bool:
        return True

    assert vars(constant(ours)) == vars(torch.compiler.assume_constant_result(theirs)) != {}
    assert vars(exporting) == vars(is_ampere) == vars(ours)


def test_neither_models_nor_trainings_load_the_compiler():
    code = """
import sys, torch
before = set(sys.modules)
import vitrail.models.registry, vitrail.runs.train
sys.exit(bool({"torch._dynamo", "torch.distributed.fsdp"} & (set(sys.modules) - before)))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_device_is_asked_once_what_it_can(monkeypatch):
    """Every layer of every pass reads it."""
    requested = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: requested.append(device) or (7 + device, 0))
    kernels.capability.cache_clear()
    try:
        assert [is_ampere(0), is_ampere(1), is_ampere(0), is_ampere(1)] == [False, True, False, True]
    finally:
        kernels.capability.cache_clear()
    assert requested == [0, 1]
