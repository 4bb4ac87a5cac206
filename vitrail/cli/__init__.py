"""The commands of `vitrail`, one file per group; `main.py` assembles them."""
