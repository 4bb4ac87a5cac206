"""Trainings as plain values: one page per paper, and a few of our own."""

from vitrail.recipes.lookup import list_recipes, lookup
from vitrail.recipes.schema import Recipe

__all__ = ["Recipe", "list_recipes", "lookup"]
