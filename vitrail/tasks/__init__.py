"""Tasks, one module each: targets, loss, validation and primary metric of a training."""

from vitrail.tasks.registry import find_task, register_task

__all__ = ["find_task", "register_task"]
