"""The state of the explorer: models, a collection, and the images that were uploaded last."""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from vitrail.errors import UserError
from vitrail.explore.collection import Collection
from vitrail.explore.explored_model import ExploredModel, OpenedImage
from vitrail.web.uploads import DEFAULT_LIMITS, RequestError, Upload, decode_images

MAX_UPLOADS, UPLOADED_BYTES = 64, 2**27


class Explorer:
    """Computes what the page shows. An image is named by its key: `c3` of the collection, or `u` and a random number."""

    def __init__(self, models: Sequence[ExploredModel], collection: Collection | None) -> None:
        self.models, self.collection = list(models), collection
        self.uploads: OrderedDict[str, Upload] = OrderedDict()
        self.lock = threading.Lock()

    def describe(self) -> dict[str, Any]:
        return {
            "models": [model.describe() for model in self.models],
            "collection": self.collection.describe(self.models) if self.collection is not None else None,
        }

    def add(self, images: Sequence[Upload]) -> list[str]:
        """Keep uploaded images, which must be readable, and remove the oldest; returns their keys."""
        for _ in decode_images(images, min_side=max(model.min_side or 1 for model in self.models)):
            pass
        keys = [f"u{secrets.token_hex(8)}" for _ in images]
        with self.lock:
            self.uploads.update(zip(keys, images, strict=True))
            while len(self.uploads) > MAX_UPLOADS or sum(len(each.content) for each in self.uploads.values()) > UPLOADED_BYTES:
                self.uploads.popitem(last=False)
        return keys

    def read(self, key: str, min_side: int | None) -> np.ndarray:
        upload = self.uploads.get(key)
        if upload is not None:
            return next(decode_images([upload], DEFAULT_LIMITS, min_side))
        return self.require_collection().read(self.row(key), min_side)

    def row(self, key: str) -> int:
        """The number of an image of the collection."""
        collection, number = self.require_collection(), key[1:]
        known = key[:1] == "c" and number.isascii() and number.isdigit() and len(number) < 10
        if not known or int(number) >= len(collection.index):
            raise RequestError(404, "There is no such image, or it was uploaded too long ago: open it again.")
        return int(number)

    def require_collection(self) -> Collection:
        if self.collection is None:
            raise RequestError(404, "There is no such image, or it was uploaded too long ago: open it again.")
        return self.collection

    def open(self, model: int, key: str) -> tuple[ExploredModel, OpenedImage]:
        if not 0 <= model < len(self.models):
            raise UserError(f"There is no model {model}.")
        explored = self.models[model]
        return explored, explored.open(key, lambda: self.read(key, explored.min_side))
