"""Every structure of the catalogue, shrunk until it runs in milliseconds."""

from functools import cache

from vitrail.models.config import Architecture
from vitrail.models.registry import model_pages


def shrink(a: Architecture) -> Architecture:
    """Fewer blocks, channels, patches and classes; every part stays what it is."""
    heads = 2 if a.heads > 1 else 1
    changes: dict = {
        "width": 64,
        "depth": min(a.depth, 2),
        "branches": min(a.branches, 2),
        "heads": heads,
        "pooling_heads": 2 if a.pooling_heads > 1 else 1,
        "image_size": (2 * a.patch_size, 3 * a.patch_size),
        "classes": 5,
        "layerscale_init": a.layerscale_init if a.residual == "constant" else 0.5,
    }
    if a.stem.startswith("resnet"):
        changes |= {"stem_width": 32, "stem_layers": tuple(1 for _ in a.stem_layers)}
    if a.stem == "resnet_features":
        changes["width"] = 32 * 4 * 8
    if a.convnet:
        basic, stages = a.convnet.block == "basic", len(a.convnet.depths)
        changes["width"] = 16
        changes["convnet"] = a.convnet.replace(
            depths=(2,) + (1,) * (stages - 1),
            widths=(16,) * stages,
            inner_widths=(16 if basic else 8,) * stages,
            groups=(1 if basic else 2,) * stages,
            root_widths=(4,) * len(a.convnet.root_widths),
        )
    if a.stem in ("tower", "basic"):
        changes["stem_width"] = 8
    if a.stem == "linear":
        changes |= {"patch_size": 4, "image_size": (8, 12)}
    return a.replace(**changes)


@cache
def structures() -> dict[str, Architecture]:
    """One shrunk architecture per way of putting parts together, under the first name that has it."""
    found: dict[Architecture, str] = {}
    for name, page in model_pages().items():
        found.setdefault(shrink(page.MODELS[name]), name)
    return {name: architecture for architecture, name in found.items()}
