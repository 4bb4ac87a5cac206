"""The models of a server by name, several deltas on one base, replaced together while requests are answered."""

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

import torch

from vitrail.checkpoints.delta import attach
from vitrail.checkpoints.model_io import find_weights, split_delta_path
from vitrail.deploy.served_model import ServedModel, one_thread, prepare_model, version_of
from vitrail.errors import UserError
from vitrail.evaluation.model import check_size, compute_logits, open_model
from vitrail.models.vision_transformer import VisionTransformer

DEFAULT = "default"
WATCH_SECONDS = 1.0
Stamp = tuple[tuple[int, int, int], ...]


class ModelFile(NamedTuple):
    """What is served under a name: weights, or a delta on the weights of the default model."""

    name: str
    weights: str
    delta: str = ""


class ModelSet:
    """Loads models and replaces those whose files have changed.

    `current` is replaced as a whole: a request that has taken a model keeps it. If a file cannot be loaded, nothing is replaced.
    """

    def __init__(
        self,
        files: list[ModelFile],
        device: str | None = None,
        precision: str | None = "fp32",
        max_batch: int = 32,
        log: Callable[[str], object] = print,
    ) -> None:
        names = [file.name for file in files]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise UserError(f"Two models have the name {min(repeated)}: give each its own.")
        self.files, self.device, self.precision, self.max_batch, self.log = files, device, precision, max_batch, log
        self.run: Callable[[Callable[[], object]], object] = lambda function: function()  # on the thread of the device
        self.stamps: dict[str, Stamp] = {}
        self.reloads, self.failures = 0, 0
        self.current: Mapping[str, ServedModel] = {}
        self.stopped = threading.Event()
        self.lock = threading.Lock()  # of reloads
        stamps = self.read_stamps()
        self.current, self.stamps = self.load(stamps), stamps

    def find(self, name: str | None) -> ServedModel:
        """The model of this name; the first without one."""
        models = self.current
        if name is None:
            return next(iter(models.values()))
        if name not in models:
            raise KeyError(name)
        return models[name]

    def read_stamps(self) -> dict[str, Stamp]:
        return {file.name: stamp(file.weights) + (stamp(file.delta) if file.delta else ()) for file in self.files}

    def load(self, stamps: dict[str, Stamp], everything: bool = False) -> dict[str, ServedModel]:
        """All models; those whose files are the same as before are not loaded again, unless `everything` is."""
        models: dict[str, ServedModel] = {}
        with one_thread():
            for file in self.files:
                known = self.current.get(file.name)
                if known is not None and not everything and stamps[file.name] == self.stamps[file.name]:
                    models[file.name] = known
                elif file.delta:
                    models[file.name] = attach_delta(file, models[self.files[0].name])
                else:
                    models[file.name] = self.open(file)
        return models

    def open(self, file: ModelFile) -> ServedModel:
        model = open_model(file.weights, self.device)
        return prepare_model(file.name, model, self.precision, self.max_batch, self.run, self.log)

    def reload(self, everything: bool = False) -> None:
        """Replace the models whose files have changed, or all."""
        with self.lock:
            stamps = self.read_stamps()
            try:
                models = self.load(stamps, everything)
            except Exception as error:
                self.failures += 1
                reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                self.log(f"The models were not replaced: {reason}")
            else:
                changed = [name for name, model in models.items() if model is not self.current[name]]
                self.current = models
                self.reloads += 1
                self.log(f"replaced: {', '.join(f'{name} (version {models[name].version})' for name in changed)}")
            self.stamps = stamps

    def watch(self, requested: threading.Event, polls: bool = True) -> None:
        """Reload when `requested` is set or, with `polls`, when a file has changed and is complete, until `stopped` is set."""
        previous = self.stamps
        while not self.stopped.is_set():
            if requested.wait(WATCH_SECONDS):
                requested.clear()
                if self.stopped.is_set():
                    return
                self.reload(everything=True)
            elif polls:
                stamps = self.read_stamps()
                complete = all(len(stamps[name]) >= len(self.stamps[name]) for name in stamps)
                if stamps != self.stamps and stamps == previous and complete:  # not while a file is being replaced
                    self.reload()
                previous = stamps


def attach_delta(file: ModelFile, base: ServedModel) -> ServedModel:
    """A model that shares its unchanged tensors with the base. It is not optimized: that would copy them."""
    if not isinstance(base.model, VisionTransformer):
        raise UserError(f"{file.name}: a delta needs weights of a Vitrail model as the base.")
    model = check_size(attach(base.model, file.delta)).requires_grad_(False)
    return ServedModel(file.name, model, lambda images: compute_logits(model, images), version_of(model), shared=True)


def stamp(path: str) -> Stamp:
    """Time, size and number of the files of weights, which change when they are replaced; () of weights by name."""
    found = []
    with suppress(OSError, UserError):  # a file does not exist at the moment
        base, delta = split_delta_path(path)
        file = find_weights(base)
        for each in (file / "model.safetensors" if file.is_dir() else file, *([delta] if delta else [])):
            status = os.stat(each)
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)


def count_bytes(models: Mapping[str, ServedModel]) -> int:
    """Memory of the weights of all models, each tensor once; without the copies that optimized models run."""
    storages: dict[int, int] = {}
    for served in models.values():
        for tensor in (*served.model.parameters(), *served.model.buffers()):
            storage: torch.UntypedStorage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
