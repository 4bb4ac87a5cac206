"""Teachers: frozen networks of any origin that tell a student what they see."""

from vitrail.teachers.class_index import match_teacher
from vitrail.teachers.lookup import open_teacher
from vitrail.teachers.teacher import Teacher

__all__ = ["Teacher", "match_teacher", "open_teacher"]
