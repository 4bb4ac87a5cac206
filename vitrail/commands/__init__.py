"""The commands of `vitrail`, one file per room; `cli.py` is their table of contents."""
