"""Where the student's classes lie among the teacher's."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.evaluation.matching import match
from vitrail.teachers.teacher import Teacher


def match_teacher(
    teacher: Teacher,
    student_classes: Sequence[str],
    mapping: Mapping[str, Any] | None = None,
    ids: Mapping[str, str] | None = None,
) -> Tensor:
    """int64 [student's classes]: `teacher(images)[:, index]` are logits in the student's order.

    Classes are found by equal lists, by name or WordNet id, or in the order given where the teacher has no names for as many;
    `mapping` says for some of the student's classes which of the teacher's they are, by name or number; `ids` are WordNet ids of
    the student's classes.
    """
    found = match(teacher.class_names, teacher.classes, student_classes, "the student", mapping, ids)
    index = []
    for name, answer in zip(student_classes, found.answer.tolist(), strict=True):
        group = found.groups[answer] if answer >= 0 else []
        if len(group) != 1:
            raise UserError(f"The map gives the student's class {name!r} {len(group)} classes of the teacher; give it one.")
        index.append(group[0])
    twice = next((place for place in index if index.count(place) > 1), None) if len(set(index)) < len(index) else None
    if twice is not None:
        both = [name for name, place in zip(student_classes, index, strict=True) if place == twice]
        raise UserError(
            f"The map gives {both[0]!r} and {both[1]!r} the same class {twice} of the teacher, which cannot tell them apart."
        )
    return torch.tensor(index, dtype=torch.int64)
