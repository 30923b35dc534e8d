"""One model, in this process: ``python -m benchmarks.zoo.model NAME --record FILE --store DIR``.

What starts it again after it was killed finds the record as it was, and the stage that killed it.
"""

from __future__ import annotations

import argparse
import math
import resource
import sys
import time
from pathlib import Path

import torch

from benchmarks.zoo.names import family
from benchmarks.zoo.record import ModelRecord, read, write
from benchmarks.zoo.stages import Model, Settings
from optimize.noise import silenced
from serve.runtime.card.execution import keep_memory


def main() -> int:
    """Run the stages that the record does not have, as far as there is time."""
    begun = time.monotonic()
    keep_memory()  # else the kernel clears each activation of some MB again: a third of a model's processor time
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--settings", type=str, required=True, help="of `Settings`, as JSON")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no stage is begun")
    parser.add_argument("--memory", type=int, required=True, help="bytes that this process may have as its own")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (options.memory, options.memory))
    record = read(options.record) or ModelRecord(name=options.name, family=family(options.name))
    options.store.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    with silenced():
        model = Model(
            options.name,
            options.store,
            Settings.from_json(options.settings),
            record,
            lambda changed: write(changed, options.record),
            until=begun + options.seconds,
        )
        model.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
