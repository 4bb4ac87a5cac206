"""Trainings as plain values: one page per paper, and a few of our own."""

from vitrail.recipes.catalogue import list_recipes, lookup
from vitrail.recipes.recipe import Recipe

__all__ = ["Recipe", "list_recipes", "lookup"]
