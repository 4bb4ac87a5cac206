"""Teachers: frozen networks of any origin whose predictions are the targets of a student, and stores of such predictions."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.teachers.class_index import match_teacher
    from vitrail.teachers.lookup import open_teacher
    from vitrail.teachers.teacher import Teacher

__all__ = ["Teacher", "match_teacher", "open_teacher"]


def __getattr__(name: str) -> Any:
    """Import on first use: reading a label store or a sidecar file does not need the networks."""
    from importlib import import_module

    modules = {"Teacher": "teacher", "match_teacher": "class_index", "open_teacher": "lookup"}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{modules[name]}"), name)
