"""A disk that is full when the first model file is written: an error that can be told, and no dead process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.serve.full_disk import on_small_disk

PROGRAM = """
import sys, warnings
from pathlib import Path
import torch
from torch import nn
from optimize.export.program import write_program, write_script
warnings.simplefilter("ignore")
module = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3)).eval()
for write in (write_program, write_script):
    try:
        write(module, torch.zeros(2, 3, 8, 8), Path(sys.argv[1]))
    except OSError as error:
        print(write.__name__, error.strerror)
"""


def test_a_disk_that_is_full_at_the_first_file_is_an_error_and_no_core_dump(tmp_path: Path) -> None:
    words = [*on_small_disk(50_000, tmp_path), sys.executable, "-c", PROGRAM, str(tmp_path)]
    found = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert found.returncode == 0, found.stderr
    full = "No space left on device"
    assert found.stdout.splitlines() == [f"write_program {full}", f"write_script {full}"]
