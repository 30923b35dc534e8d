"""Recommends the artifact to serve by the user's rule, with tests and reasons."""
