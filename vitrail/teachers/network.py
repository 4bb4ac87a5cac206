"""Networks inside a teacher: one interface for Vitrail models, convnets, timm models and other modules."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.models.vision_transformer import Features, VisionTransformer, fuse_logits

if TYPE_CHECKING:
    from vitrail.models.efficientnet import EfficientNet

Size = tuple[int, int]


class Network(nn.Module, ABC):
    """Logits, dense logits and features of images [B, 3, height, width] with the network's own preprocessing."""

    fixed_size: Size | None = None  # the only supported image size
    autocast = True  # bfloat16 on CUDA

    def predict(self, images: Tensor, outputs: Sequence[str]) -> dict[str, Tensor]:
        """One or more of logits, tokens (dense logits) and features, in one forward pass if possible."""
        methods = {"logits": self.logits, "tokens": self.dense, "features": self.features}
        return {name: methods[name](images) for name in outputs}

    @abstractmethod
    def logits(self, images: Tensor) -> Tensor:
        """[B, C]"""

    def dense(self, images: Tensor) -> Tensor:
        """[B, C, h, w]: the classifier at every position."""
        raise UserError("This teacher predicts one label per image: use a convnet or a Vitrail model for dense labels.")

    def features(self, images: Tensor) -> Tensor:
        """[B, D]: the input of the classifier."""
        raise UserError("This teacher returns only logits: use a convnet or a Vitrail model for features.")


class SharedPassNetwork(Network):
    """A network that computes all outputs from one forward pass of its backbone."""

    @abstractmethod
    def heads(self, images: Tensor) -> dict[str, Callable[[], Tensor]]:
        """Functions that compute the outputs from the features of the images."""

    def predict(self, images: Tensor, outputs: Sequence[str]) -> dict[str, Tensor]:
        heads = self.heads(images)
        return {name: heads[name]() for name in outputs}

    def logits(self, images: Tensor) -> Tensor:
        return self.predict(images, ("logits",))["logits"]

    def dense(self, images: Tensor) -> Tensor:
        return self.predict(images, ("tokens",))["tokens"]

    def features(self, images: Tensor) -> Tensor:
        return self.predict(images, ("features",))["features"]


class ConvNetwork(SharedPassNetwork):
    """A convnet that cannot be trained here; dense logits are the classifier at every position of the feature maps."""

    def __init__(self, model: "EfficientNet"):
        super().__init__()
        self.model = model

    def heads(self, images: Tensor) -> dict[str, Callable[[], Tensor]]:
        maps, classifier = self.model.forward_features(images), self.model.get_classifier()
        return {
            "logits": lambda: classifier(maps.mean((2, 3))),
            "tokens": lambda: classifier(maps.movedim(1, -1)).movedim(-1, 1),
            "features": lambda: maps.mean((2, 3)),
        }


class TransformerNetwork(SharedPassNetwork):
    """A Vitrail model; dense logits are those of its dense head, or of its classifier at every patch."""

    def __init__(self, model: VisionTransformer):
        super().__init__()
        a = model.architecture
        self.model = model
        if a.mixer in ("linear", "mlp") or a.pooling == "class_mlp":
            self.fixed_size = a.image_size  # linear layers over patches have a fixed grid

    def predict(self, images: Tensor, outputs: Sequence[str]) -> dict[str, Tensor]:
        if self.model.architecture.pooling == "per_class":
            if "tokens" in outputs:
                raise UserError("A model with one query per class has no classifier for patches: use another teacher.")
            if "features" in outputs:
                raise UserError("A model with one query per class has no pooled features: use another teacher.")
        return super().predict(images, outputs)

    def heads(self, images: Tensor) -> dict[str, Callable[[], Tensor]]:
        features = self.model.features(images)
        return {
            "logits": lambda: self.model.classify(features).logits,
            "tokens": lambda: self._dense(features),
            "features": lambda: features.pooled,
        }

    def logits(self, images: Tensor) -> Tensor:
        out: Tensor = self.model(images)
        return out

    def _dense(self, features: Features) -> Tensor:
        model = self.model
        if model.head_dense is not None:
            logits = model.head_dense(features.tokens)
        else:
            tokens = model.pre_logits(model.norm(features.tokens) if model.architecture.pool_norm else features.tokens)
            logits = model.head(tokens)
            if model.head_distillation is not None:
                logits = fuse_logits(logits, model.head_distillation(tokens), model.architecture.fusion)
        out: Tensor = logits.transpose(1, 2).unflatten(2, features.grid)
        return out


class ModuleNetwork(Network):
    """Any module from images to logits."""

    module: Any

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def logits(self, images: Tensor) -> Tensor:
        output = self.module(images)
        logits: Tensor = getattr(output, "logits", output)  # models of transformers return an object
        return logits


class TimmNetwork(ModuleNetwork):
    """A module with timm's `forward_features` and `forward_head`, a convnet or a transformer."""

    def predict(self, images: Tensor, outputs: Sequence[str]) -> dict[str, Tensor]:
        if len(outputs) == 1:
            return super().predict(images, outputs)
        features = self.module.forward_features(images)
        heads: dict[str, Callable[[], Tensor]] = {
            "logits": lambda: self.module.forward_head(features),
            "tokens": lambda: self._dense(features, images),
            "features": lambda: self.module.forward_head(features, pre_logits=True),
        }
        return {name: heads[name]() for name in outputs}

    def features(self, images: Tensor) -> Tensor:
        out: Tensor = self.module.forward_head(self.module.forward_features(images), pre_logits=True)
        return out

    def dense(self, images: Tensor) -> Tensor:
        return self._dense(self.module.forward_features(images), images)

    def _dense(self, features: Tensor, images: Tensor) -> Tensor:
        # Each position is given to the head as an image of its own, so that layers before the classifier are applied.
        if features.dim() == 4 and getattr(self.module, "output_fmt", "NCHW") == "NHWC":
            height, width = features.shape[1:3]
            positions = features.flatten(0, 2)[:, None, None, :]
        elif features.dim() == 4:
            height, width = features.shape[2:]
            positions = features.movedim(1, -1).flatten(0, 2)[:, :, None, None]
        elif hasattr(getattr(self.module, "patch_embed", None), "dynamic_feat_size"):
            prefix = getattr(self.module, "num_prefix_tokens", 0)
            height, width = self.module.patch_embed.dynamic_feat_size(images.shape[-2:])
            positions = features[:, prefix:].flatten(0, 1)[:, None].expand(-1, prefix + 1, -1)
        else:
            return super().dense(images)
        out: Tensor = self.module.forward_head(positions).unflatten(0, (len(images), height, width)).movedim(-1, 1)
        return out
