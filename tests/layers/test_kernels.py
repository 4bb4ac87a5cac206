"""The compiler is loaded where something is compiled, not elsewhere: it takes longer than the rest of a command's start."""

import subprocess
import sys

import torch

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
import vitrail.models.catalogue, vitrail.training.run
sys.exit(bool({"torch._dynamo", "torch.distributed.fsdp"} & (set(sys.modules) - before)))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
