"""What the weights of stored runs do, beside each other: the norms of residual branches (CaiT, Fig. 4)."""

from collections.abc import Sequence

from vitrail.checkpoints import load
from vitrail.data.contact_sheet import sample_images
from vitrail.devices import choose_device
from vitrail.interpret.attention import record
from vitrail.interpret.branch_norms import branch_norms, draw_branch_norms
from vitrail.runs.augmentation_figures import open_splits_of
from vitrail.runs.comparison import Group

IMAGES, MAX_MODELS = 8, 3


def draw_norms(groups: Sequence[Group]) -> bytes:
    """The best weights of the first run of up to three groups, on the same validation images of the first one."""
    images = [pixels for _, pixels in sample_images(open_splits_of(groups).validation, IMAGES, 0)]
    norms = {}
    for group in groups[:MAX_MODELS]:
        model = load(group.results[0].folder / "best.safetensors", device=choose_device(None))
        norms[group.name] = branch_norms(record(model, model.preprocess(images)))
    return draw_branch_norms(norms)


FIGURES = {"branch-norms": draw_norms}
