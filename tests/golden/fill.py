"""Rebuilds the reference checkpoints behind the golden outputs: every tensor follows from its name and shape."""

import gzip
import json
import zlib
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
MODELS: dict[str, dict] = json.loads(gzip.decompress((FOLDER / "keys.json.gz").read_bytes()))


def checkpoint(name: str) -> dict[str, np.ndarray]:
    return {key: fill(key, tuple(shape)) for key, shape in MODELS[name]["keys"].items()}


def fill(key: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(key.encode()))
    return (fill_flax if "/" in key or key == "cls" else fill_torch)(key, shape, rng)


def fill_torch(key: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if len(shape) == 0:  # num_batches_tracked
        return np.zeros(shape, "int64")
    if len(shape) >= 2 and not key.endswith(("token", "pos_embed", "alpha", "beta", "gamma_1", "gamma_2")):
        return (rng.standard_normal(shape) / np.sqrt(int(np.prod(shape[1:])))).astype("float32")
    if key.endswith(("gamma_1", "gamma_2")):
        return rng.uniform(0.05, 0.15, shape).astype("float32")
    if key.endswith(("bias", "beta", "running_mean", "token", "pos_embed")):
        return rng.uniform(-0.2, 0.2, shape).astype("float32")
    return rng.uniform(0.5, 1.5, shape).astype("float32")


def fill_flax(key: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    leaf = key.split("/")[-1]
    if leaf == "kernel" and len(shape) >= 2:
        fan_in = shape[0] if any(name in key for name in ("query", "key", "value")) else int(np.prod(shape[:-1]))
        return (rng.standard_normal(shape) / np.sqrt(fan_in)).astype("float32")
    if leaf in ("bias", "pos_embedding", "cls"):
        return rng.uniform(-0.2, 0.2, shape).astype("float32")
    return rng.uniform(0.5, 1.5, shape).astype("float32")


def image(batch: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((batch, 3, height, width)).astype("float32")
