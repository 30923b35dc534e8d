"""One file for each engine that reports its layers: how to turn the report on, and how to read it."""
