"""Tasks by name, imported when they are used: those of the package, registered ones, and entry points of other packages."""

import difflib
import importlib
from importlib.metadata import entry_points

from vitrail.errors import UserError
from vitrail.training.task import Task

BUILT_IN = {
    "classification": "vitrail.tasks.classification:Classification",
    "dino": "vitrail.tasks.dino:Dino",
    "masked_patches": "vitrail.tasks.masked_patches:MaskedPatches",
    "beit": "vitrail.tasks.beit:Beit",
    "grafit": "vitrail.tasks.grafit:Grafit",
    "segmentation": "vitrail.tasks.segmentation:Segmentation",
    "detection": "vitrail.tasks.detection:Detection",
    "tokenizer": "vitrail.tasks.tokenizer:TokenizerTraining",
}
ENTRY_POINTS = "vitrail.tasks"  # the group under which an installed package offers tasks
_registered: dict[str, type[Task]] = {}


def register_task(name: str, task: type[Task]) -> None:
    """Make a task known to this process under a name that recipes can use (`task=name`)."""
    _registered[name] = task


def find_task(name: str) -> type[Task]:
    """The class of a task. A recipe names tasks and never code to import."""
    if name in _registered:
        return _registered[name]
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        task: type[Task] = getattr(importlib.import_module(module), attribute)
        return task
    installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in installed:
        installed_task: type[Task] = installed[name].load()
        return installed_task
    known = [*BUILT_IN, *_registered, *installed]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; choose from {', '.join(known)}"
    raise UserError(f"There is no task {name!r}{hint}.")
