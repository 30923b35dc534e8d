"""How a page tells the command that made it."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

#: Options that say where things are kept and how much is done at a time, and nothing of what comes out.
_OF_THE_PLACE: Final = frozenset({"--store", "--state", "--records", "--write", "--limit", "--only"})


def command(module: str, words: Sequence[str], without: Collection[str] = (), told: Collection[str] = ()) -> str:
    """A command as whoever reads its page would give it: folders as theirs, files by their names.

    Args:
        module: that was run.
        words: its arguments.
        without: flags that are not told, beside the options that say where things are kept.
        told: those of these options that are told all the same: ``--only``, where a page has nothing else.
    """
    kept: list[str] = []
    skipping = False
    for word in words:
        if word.startswith("--"):
            skipping = word in _OF_THE_PLACE and word not in told
        if skipping or word in without:
            continue
        kind, _, folder = word.partition(":")
        kept.append(
            f"{kind}:DIR" if Path(folder).is_absolute() else Path(word).name if Path(word).is_absolute() else word
        )
    return shlex.join(["python", "-m", module, *kept])
