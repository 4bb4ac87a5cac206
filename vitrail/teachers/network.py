"""What a teacher asks of the network inside it, and the networks that answer by maps, by tokens or by logits alone."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.models.vision_transformer import Features, VisionTransformer, fuse

Size = tuple[int, int]


class Network(nn.Module, ABC):
    """Images [B, 3, height, width], prepared as the network was trained to see them, to what it knows about them."""

    only_size: Size | None = None  # the one size that it takes
    mixed = True  # may compute in bfloat16 where that is fast

    def answers(self, images: Tensor, what: Sequence[str]) -> dict[str, Tensor]:
        """Several of logits, tokens (the dense answer) and features at once, which takes one pass where it can."""
        questions = {"logits": self.logits, "tokens": self.dense, "features": self.features}
        return {name: questions[name](images) for name in what}

    @abstractmethod
    def logits(self, images: Tensor) -> Tensor:
        """[B, C]"""

    def dense(self, images: Tensor) -> Tensor:
        """[B, C, h, w]: the classifier at every position."""
        raise UserError("This teacher gives one answer per image; take a convnet or a Vitrail model for one per position.")

    def features(self, images: Tensor) -> Tensor:
        """[B, D]: what the classifier reads."""
        raise UserError("This teacher gives logits alone; take a convnet or a Vitrail model for its features.")


class ConvNet(Network):
    """Maps, their mean, a linear classifier: the head may read every position as well as their mean."""

    @abstractmethod
    def maps(self, images: Tensor) -> Tensor:
        """[B, D, h, w]"""

    @abstractmethod
    def classifier(self) -> nn.Linear:
        """Of what `features` gives."""

    def answers(self, images: Tensor, what: Sequence[str]) -> dict[str, Tensor]:
        maps, read = self.maps(images), self.classifier()
        found = {}
        for name in what:
            if name == "tokens":
                found[name] = read(maps.movedim(1, -1)).movedim(-1, 1)
            else:
                pooled = maps.mean((2, 3))
                found[name] = read(pooled) if name == "logits" else pooled
        return found

    def logits(self, images: Tensor) -> Tensor:
        return self.answers(images, ("logits",))["logits"]

    def dense(self, images: Tensor) -> Tensor:
        return self.answers(images, ("tokens",))["tokens"]

    def features(self, images: Tensor) -> Tensor:
        return self.answers(images, ("features",))["features"]


class Transformer(Network):
    """A Vitrail model. Its dense answer is the dense head's, where it has one, or the class head's on every patch."""

    def __init__(self, model: VisionTransformer):
        super().__init__()
        a = model.architecture
        self.model = model
        if a.mixer in ("linear", "mlp") or a.pooling == "class_mlp":
            self.only_size = a.image_size  # their maps from patch to patch belong to one grid

    def answers(self, images: Tensor, what: Sequence[str]) -> dict[str, Tensor]:
        if self.model.architecture.pooling == "per_class":
            if "tokens" in what:
                raise UserError(
                    "A model with one query per class has no head for patches; take another teacher for dense labels."
                )
            if "features" in what:
                raise UserError("A model with one query per class has no pooled vector; take another teacher for its features.")
        found = self.model.features(images)
        read = {
            "logits": lambda: self.model.classify(found).logits,
            "tokens": lambda: self._at_patches(found),
            "features": lambda: found.pooled,
        }
        return {name: read[name]() for name in what}

    def logits(self, images: Tensor) -> Tensor:
        return self.model(images)

    def dense(self, images: Tensor) -> Tensor:
        return self.answers(images, ("tokens",))["tokens"]

    def features(self, images: Tensor) -> Tensor:
        return self.answers(images, ("features",))["features"]

    def _at_patches(self, found: Features) -> Tensor:
        model = self.model
        if model.head_dense is not None:
            answer = model.head_dense(found.tokens)
        else:
            tokens = model.pre_logits(model.norm(found.tokens) if model.architecture.pool_norm else found.tokens)
            answer = model.head(tokens)
            if model.head_distillation is not None:
                answer = fuse(answer, model.head_distillation(tokens), model.architecture.fusion)
        return answer.transpose(1, 2).unflatten(2, found.grid)


class Plain(Network):
    """Any module from images to logits."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def logits(self, images: Tensor) -> Tensor:
        answer = self.module(images)
        return getattr(answer, "logits", answer)  # models of transformers return more than a tensor


class Timm(Plain):
    """A module with timm's `forward_features` and `forward_head`, a convnet or a transformer."""

    module: Any

    def answers(self, images: Tensor, what: Sequence[str]) -> dict[str, Tensor]:
        if len(what) == 1:
            return super().answers(images, what)
        found = self.module.forward_features(images)
        read = {
            "logits": lambda: self.module.forward_head(found),
            "tokens": lambda: self._at_places(found, images),
            "features": lambda: self.module.forward_head(found, pre_logits=True),
        }
        return {name: read[name]() for name in what}

    def features(self, images: Tensor) -> Tensor:
        return self.module.forward_head(self.module.forward_features(images), pre_logits=True)

    def dense(self, images: Tensor) -> Tensor:
        return self._at_places(self.module.forward_features(images), images)

    def _at_places(self, found: Tensor, images: Tensor) -> Tensor:
        # Every position is shown to the head as an image of its own, so that norms and layers before the classifier apply.
        if found.dim() == 4 and getattr(self.module, "output_fmt", "NCHW") == "NHWC":
            height, width = found.shape[1:3]
            places = found.flatten(0, 2)[:, None, None, :]
        elif found.dim() == 4:
            height, width = found.shape[2:]
            places = found.movedim(1, -1).flatten(0, 2)[:, :, None, None]
        elif hasattr(getattr(self.module, "patch_embed", None), "dynamic_feat_size"):
            prefix = getattr(self.module, "num_prefix_tokens", 0)
            height, width = self.module.patch_embed.dynamic_feat_size(images.shape[-2:])
            places = found[:, prefix:].flatten(0, 1)[:, None].expand(-1, prefix + 1, -1)
        else:
            return super().dense(images)
        return self.module.forward_head(places).unflatten(0, (len(images), height, width)).movedim(-1, 1)
