"""The layout of a store and the names of runs, in one place for writers and servers.

``<store>/<run>/`` has these files:

- ``run.json``: the run's model and data
- ``report.json``, ``report.html``, ``pareto.svg``
- ``objects.json``: the store's objects that it needs
- ``artifacts/<name>/``: ``card.json``, the files that it names, ``serving.json``, ``known.json`` and
  ``measurements.json``
- ``archives/<run>-<name>.mar``, with ``….mar.cdx.json``, and ``….mar.sig`` if it is signed
- ``sample.<ext>``
- ``files.json``: the sealed list of all of these (`serve.runs.sealed_files`)

Results of further commands are beside it, in ``<store>/<run>.search/`` and similar folders.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

#: The default data. A run's name does not mention it.
PLAIN_DATA = "digits"

ARTIFACTS = "artifacts"
ARCHIVES = "archives"
REPORT_FILE = "report.json"
PAGE_FILE = "report.html"
PLOT_FILE = "pareto.svg"
OBJECTS_FILE = "objects.json"
IDENTITY_FILE = "run.json"
#: The sealed list of a run's files.
SEAL_FILE = "files.json"
#: The default folder of exports.
EXPORTS = "export"
#: Ending of the file with the traceback of a failed stage.
ERROR_ENDING = "-error.txt"
#: Files beside an artifact's card during a tuning: its measurements, and its server's process.
JOURNAL_FILE = "tuning.journal"
SERVER_FILE = "tuning.server"
TUNING_STATE = (JOURNAL_FILE, SERVER_FILE)
#: Endings of the files beside an archive: its signature, and its bill of materials.
SIGNATURE_ENDING = ".sig"
SBOM_ENDING = ".cdx.json"
#: Endings of folders beside a run's, by the command that writes into them. No run may have such a name.
PROFILE_ENDING = ".profile"
SEARCH_ENDING = ".search"
SENSITIVITY_ENDING = ".sensitivity"
FOUND_ENDINGS = (PROFILE_ENDING, SEARCH_ENDING, SENSITIVITY_ENDING)
LOCKS = Path(".store", "locks")

_ILLEGAL = re.compile(r"[^A-Za-z0-9_.-]+")
_LONGEST = 64  # characters of a name made from a user's text


def run_name(model: str, data: str = PLAIN_DATA) -> str:
    """Return the default name for the run of a model on some data.

    ``resnet18`` is ``resnet18``. ``path/to/net.py:build`` and ``package.net:build`` are ``net-build``, and
    ``timm:resnet18`` is ``timm-resnet18``. Data other than `PLAIN_DATA` follow: ``resnet18-cifar10``. A folder adds its
    own name: ``resnet18-flowers`` for ``imagefolder:/data/flowers``.

    Args:
        model: as on the command line.
        data: as on the command line.
    """
    where, colon, factory = model.rpartition(":")
    module = Path(where).stem if where.endswith(".py") or "/" in where else where.rpartition(".")[2]
    words = [module, factory] if colon else [model]
    kind, colon, place = data.partition(":")
    if colon:
        words.append(expanded(place).resolve().name or kind)
    elif (word := re.sub("[-_]", "", kind).lower()) != PLAIN_DATA:
        words.append(word)
    name = "-".join(map(_legal, words))
    ending = next(filter(name.endswith, FOUND_ENDINGS), "")
    return name.removesuffix(ending) + ending.replace(".", "-")


def _legal(word: str) -> str:
    """Replace characters that a run's name cannot have by hyphens. If nothing else is left, return a digest."""
    legal = _ILLEGAL.sub("-", word).strip("-._")[:_LONGEST]
    return legal or hashlib.sha256(word.encode()).hexdigest()[:8]


def expanded(path: str) -> Path:
    """Return the path with the home folder for its ``~``, or unchanged if there is no such folder or user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def run_and_artifact(name: str) -> tuple[str, str | None]:
    """Split ``RUN/ARTIFACT``. For a run alone the artifact is None. A final slash, which shells add, is ignored."""
    run, _, artifact = name.rstrip("/").partition("/")
    return run, artifact or None


def is_run_name(name: str) -> bool:
    """Whether a name is legal for a run.

    It has letters, digits, ``-``, ``_`` and ``.``, begins with a letter or digit, and has none of `FOUND_ENDINGS`.
    """
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name) is not None and not name.endswith(FOUND_ENDINGS)


def report_path(store: Path, run: str) -> Path:
    """Return the path of the run's report."""
    return store / run / REPORT_FILE


def run_lock(run: str) -> str:
    """Return the name of the lock in `LOCKS` that writers of a run's folder hold."""
    return f"run-{run}"


def artifact_folder(store: Path, run: str, artifact: str) -> Path:
    """Return the folder of an artifact's card and files."""
    return store / run / ARTIFACTS / artifact


def served_name(run: str, artifact: str) -> str:
    """Return the served model's name for an artifact of a run."""
    return f"{run}-{artifact}"


def archive_path(store: Path, run: str, artifact: str) -> Path:
    """Return the path of an artifact's archive."""
    return store / run / ARCHIVES / f"{served_name(run, artifact)}.mar"


def archive_of(path: Path) -> Path:
    """Return the archive that a file belongs to: a signature, a bill of materials, or the archive itself."""
    return path.with_name(path.name.removesuffix(SIGNATURE_ENDING).removesuffix(SBOM_ENDING))


def model_anywhere(model: str) -> str:
    """Return a model's reference that is valid in any folder: with the absolute path of its file."""
    where, colon, factory = model.rpartition(":")
    if colon and (where.endswith(".py") or "/" in where):
        return f"{expanded(where).resolve()}:{factory}"
    return model


def data_anywhere(data: str) -> str:
    """Return a data set's reference that is valid in any folder: with its absolute path."""
    kind, colon, place = data.partition(":")
    return f"{kind}:{expanded(place).resolve()}" if colon else re.sub("[-_]", "", kind).lower()
