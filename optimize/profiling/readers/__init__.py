"""One file for each engine that tells what its layers take: how to make it tell, and how to read it."""
