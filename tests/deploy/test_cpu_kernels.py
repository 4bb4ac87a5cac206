"""The compiled kernels against float64, and what happens where there is no compiler."""

import copy
import re

import pytest
import torch
from torch.nn import functional as F

from vitrail.deploy import cpu_kernels as module
from vitrail.deploy.cpu_kernels import load_cpu_kernels

needs_kernels = pytest.mark.skipif(load_cpu_kernels() is None, reason=f"no kernels: {module.unavailable_reason()}")
SHAPES = [(1, 2, 197, 197, 64), (2, 3, 17, 17, 48), (1, 1, 1, 40, 32), (3, 2, 5, 16, 16), (1, 1, 13, 1, 80), (1, 3, 70, 15, 64)]


def attended(query, key, value, scale):
    parts = (each.double().transpose(1, 2) for each in (query, key, value))
    return F.scaled_dot_product_attention(*parts, scale=scale).transpose(1, 2).flatten(2)


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("threads", [1, 2])
def test_attention(shape, dtype, tolerance, threads):
    batch, heads, queries, keys, size = shape
    if not load_cpu_kernels().supports(dtype, size):
        pytest.skip("this CPU has no bfloat16 instructions")
    generator = torch.Generator().manual_seed(0)
    joined = torch.randn(batch, max(queries, keys), 3, heads, size, generator=generator).to(dtype)
    query, key, value = joined.unbind(2)
    query, key, value = query[:, :queries], key[:, :keys], value[:, :keys]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for scale, more in ((size**-0.5, 1), (4.0, 20)):  # weights spread, and almost all on one key, by large scores
            expected = attended(query, key, value, scale)
            found = load_cpu_kernels().attend(query, key, value, scale)
            assert found.dtype == dtype
            assert (found.double() - expected).abs().max() < more * tolerance * expected.abs().max()
        quantized = load_cpu_kernels().attend(query, key, value, size**-0.5, (20.0, 100.0))
        expected = attended(query, key, value, size**-0.5) * 20 + 100
        assert (quantized.double() - expected.clamp(0, 255)).abs().max() < 0.5 + 20 * tolerance * 4
    finally:
        torch.set_num_threads(before)


@needs_kernels
def test_nan_is_kept():
    joined = torch.randn(1, 20, 3, 2, 32)
    joined[0, 7, 1, 0, 3] = torch.nan
    found = load_cpu_kernels().attend(*joined.unbind(2), 1.0).unflatten(-1, (2, 32))
    assert found[..., 0, :].isnan().all()
    assert found[..., 1, :].isfinite().all()


@needs_kernels
def test_norms_in_uint8():
    x = 3 * torch.randn(2, 9, 48) + 5
    expected = (F.layer_norm(x.double(), (48,), eps=1e-6) * 60 + 120).clamp(0, 255)
    found = load_cpu_kernels().norm_to_int8(x, 1e-6, 60.0, 120.0)
    assert found.dtype == torch.uint8
    assert (found.double() - expected).abs().max() < 0.5001
    assert {0, 255} <= set(found.flatten().tolist())  # some were clipped
    assert torch.equal(load_cpu_kernels().norm_to_int8(x[:, :1], 1e-6, 60.0, 120.0), found[:, :1])


@needs_kernels
def test_a_copy_is_the_same_object():
    assert copy.deepcopy(load_cpu_kernels()) is load_cpu_kernels()


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """As in a new process with an empty cache."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path))
    module.load_or_reason.cache_clear()
    yield tmp_path
    module.load_or_reason.cache_clear()


@needs_kernels
def test_the_library_is_compiled_once_and_cached(fresh, monkeypatch):
    assert module.load_cpu_kernels() is not None
    (kept,) = (fresh / "kernels").iterdir()
    module.load_or_reason.cache_clear()
    monkeypatch.setattr(module, "compile_to", None)
    assert module.load_cpu_kernels() is not None
    assert list((fresh / "kernels").iterdir()) == [kept]


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda patch: patch.setenv("CXX", "false"), "false failed"),
        (lambda patch: patch.setenv("CXX", "no-such-compiler"), "no-such-compiler"),
        (lambda patch: patch.setattr(module.shutil, "which", lambda name: None), "no C[+][+] compiler"),
        (lambda patch: patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2"), "no AVX-512"),
        (lambda patch: patch.setenv("VITRAIL_CACHE", "/dev/null/nowhere"), "cannot be written|No such|Not a directory|AVX-512"),
    ],
)
def test_unavailable(fresh, monkeypatch, break_it, reason):
    monkeypatch.delenv("CXX", raising=False)
    if not reason.endswith("AVX-512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    break_it(monkeypatch)
    assert module.load_cpu_kernels() is None
    assert re.search(reason, module.unavailable_reason())
