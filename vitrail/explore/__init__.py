"""The explorer: a local page, or one static file, that shows what models attend to and where they are wrong."""
