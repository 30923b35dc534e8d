"""Commands in messages, in the form that the reader can run in the current folder."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

#: The default store of all commands.
DEFAULT_STORE = Path("model_store")


def command(words: str, store: Path = DEFAULT_STORE) -> str:
    """Return ``serve start RUN`` as ``.venv/bin/python -m serve start RUN``, with a store other than the default."""
    option = "" if store == DEFAULT_STORE else f" --store {shlex.quote(str(store))}"
    return f"{_python()} -m {words}{option}"


def target(name: str, otherwise: str, store: Path = DEFAULT_STORE, **variables: str) -> str:
    """Return ``make NAME VARIABLE=value`` for users of make, and the command ``otherwise`` for others."""
    if "MAKELEVEL" not in os.environ:
        return command(otherwise, store)
    given = variables | ({} if store == DEFAULT_STORE else {"STORE": str(store)})
    return " ".join(["make", name, *(f"{key}={shlex.quote(value)}" for key, value in given.items())])


def _python() -> str:
    """Return this interpreter: ``python`` if it is first on the path, else its path, relative if possible."""
    # Not resolved: an environment's python is a link to one outside it.
    own = Path(sys.executable).absolute()
    first = shutil.which("python")
    if first is not None and Path(first).absolute() == own:
        return "python"
    here = Path.cwd()
    return shlex.quote(str(own.relative_to(here) if own.is_relative_to(here) else own))
