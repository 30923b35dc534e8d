"""Generates the reference of the options of ``optimize run`` for the documentation."""

from __future__ import annotations

from optimize.run.job import Job
from serve.common.command_options import options_table


def run_options() -> str:
    """Return a table in Markdown with a row for each option of ``optimize run``, in the order of its help."""
    return options_table(Job)
