"""A user's package: a model that is put together from parts of neighbouring files."""
