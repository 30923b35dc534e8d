"""``python -m tests.optimize.lean``: the command line as tests start it that can start a module only.

Without `torch.compile` and float graphs to measure beside what is asked for, and without waiting for whoever measures
on this machine: its times are not read.
"""

import tempfile
from pathlib import Path

import pytest

from optimize.cli import main
from optimize.measure import process_pool
from tests.optimize.runs_fixtures import references

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch, references(graphs=False):
        patch.setattr(process_pool, "LOCK_FILE", Path(folder) / "lock")
        main()
