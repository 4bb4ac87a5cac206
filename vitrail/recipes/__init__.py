"""Recipes: complete training configurations, one module per paper, and the default recipes."""

from vitrail.recipes.lookup import list_recipes, lookup
from vitrail.recipes.schema import Recipe

__all__ = ["Recipe", "list_recipes", "lookup"]
