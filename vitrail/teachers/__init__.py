"""Teachers: frozen networks of any origin that tell a student what they see."""

from vitrail.teachers.matching import match_teacher
from vitrail.teachers.opening import open_teacher
from vitrail.teachers.teacher import Teacher

__all__ = ["Teacher", "match_teacher", "open_teacher"]
