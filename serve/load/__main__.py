"""The generator's process. It reads a plan and a workload from files, and writes the result as JSON."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

from serve.load.generator import generate
from serve.load.plan import Plan
from serve.load.workload import Workload


def main() -> int:
    """Run ``python -m serve.load PLAN.json WORKLOAD_FOLDER``."""
    plan = Plan.from_json(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    workload = Workload.load(Path(sys.argv[2]))
    gc.freeze()
    gc.disable()  # a collection would be measured as the server's; a run makes no cycles
    json.dump(generate(plan, workload).to_json(), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
