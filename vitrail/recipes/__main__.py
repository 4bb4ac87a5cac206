"""Writes the index of the recipes: python -m vitrail.recipes, after a change of a page."""

from vitrail.recipes.lookup import INDEX, make_index

if __name__ == "__main__":
    INDEX.write_text(make_index())
