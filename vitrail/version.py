"""The project's version, importable without torch."""

__version__ = "0.1.0"
