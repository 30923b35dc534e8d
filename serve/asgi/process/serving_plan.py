"""The models to serve, from arguments or a file. Read at the start and again at each SIGHUP."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ConfigDict, Field, field_validator

from serve.archive.archive_file import MODEL_VERSION, check_model_name
from serve.common.config import Config
from serve.common.yaml_numbers import Loader
from serve.runs import stored_runs
from serve.runtime.errors import UserError

_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


@dataclass(frozen=True)
class Wanted:
    """One version of a model to serve: its name, version, archive and weight."""

    name: str
    version: str
    archive: Path
    weight: int = 1


class Version(Config):
    """One version of a model, in a file of models."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="")

    archive: str = Field(
        description="RUN or RUN/ARTIFACT in the store, or the path of a .mar file, relative to this file's folder."
    )
    version: str = Field(default=MODEL_VERSION, description="Name of the version: a word or number in quotes.")
    weight: int = Field(
        default=1,
        ge=0,
        le=1000,
        description="Weight of this version for requests that do not name one, relative to the other versions.",
    )

    @field_validator("version")
    @classmethod
    def _is_a_word(cls, value: str) -> str:
        if not _VERSION.fullmatch(value):
            raise ValueError(
                "a version has up to 40 letters, digits, '.', '_' or '-', and starts with a letter or digit"
            )
        return value


class _UniqueKeys(Loader):
    """YAML that rejects a repeated key. PyYAML would silently drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


def versions_of(body: object) -> dict[str, tuple[Version, ...]]:
    """Return the versions of each model by name, from a document ``models: {NAME: [{archive: …, version: …}, …]}``.

    Raises:
        UserError: the document has another form.
    """
    shape = "write it as `models: {NAME: [{archive: …, version: …, weight: …}, …]}`"
    models = body.get("models") if isinstance(body, dict) and set(body) == {"models"} else None
    if not isinstance(models, dict) or not models:
        raise UserError(shape)
    found = {}
    for name, entries in models.items():
        if not isinstance(name, str):  # YAML reads 7, 0x7 and 7.0 as one key, also `on` and `yes`
            raise UserError(f"the name of a model must be text, but YAML reads one as {name!r}: put it in quotes")
        check_model_name(name)
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise UserError(f"{name} must be a list of versions: {shape}")
        try:
            versions = tuple(Version(**{str(key): value for key, value in entry.items()}) for entry in entries)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        names = [entry.version for entry in versions]
        if len(set(names)) != len(names):
            raise UserError(f"{name} lists a version twice: {', '.join(names)}")
        if not any(entry.weight for entry in versions):
            raise UserError(f"{name} needs a version with a weight above 0")
        found[name] = versions
    return found


@dataclass(frozen=True)
class Plan:
    """The models to serve.

    Attributes:
        words: ``RUN`` (its recommended artifact), ``RUN/ARTIFACT``, or the path of a ``.mar``. Each may begin with
            ``NAME=``.
        file: a file of models instead; see `versions_of`.
        store: the folder of the runs.
        device: where archives may run, if the word names only a run.
    """

    words: tuple[str, ...]
    file: Path | None
    store: Path
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def read(self) -> tuple[Wanted, ...]:
        """Return the versions to serve now.

        Raises:
            UserError: a run, an archive or the file is missing, or the file is not a valid file of models.
            CardError: an archive is damaged.
        """
        if self.file is not None:
            return tuple(self._of_file(self.file))
        wanted = [self._of_word(word) for word in self.words]
        names = [entry.name for entry in wanted]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(
                f"{twice} is given twice: to serve several versions of one model, list them in a file (--models)"
            )
        return tuple(wanted)

    def _of_word(self, word: str) -> Wanted:
        if not word.endswith(".mar"):
            name, archive = self._of_run(stored_runs.find_target(word))
            return Wanted(name, MODEL_VERSION, archive)
        name, equals, place = word.partition("=")
        if not equals or "/" in name:  # the sign belongs to a folder's name
            name, place = Path(word).stem, word
        archive = _existing_archive(Path(place))
        return Wanted(check_model_name(name), MODEL_VERSION, archive)

    def _of_run(self, target: stored_runs.Target) -> tuple[str, Path]:
        """Return the archive of a run, and the default name for it."""
        return next(iter(stored_runs.select(self.store, [target], device=self.device).archives.items()))

    def _of_entry(self, word: str, folder: Path) -> Path:
        """Return the archive for a word in a file of models in this folder."""
        named = "in a file of models the keys are the names: leave out NAME="
        if word.endswith(".mar"):
            return _existing_archive(folder / word, f"; {named}" if "=" in word else "")
        target = stored_runs.find_target(word)
        if target.name is not None:
            raise UserError(f"{word}: {named}")
        return self._of_run(target)[1]

    def _of_file(self, file: Path) -> list[Wanted]:
        try:
            body = yaml.load(file.read_text(encoding="utf-8"), _UniqueKeys)
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror})") from None
        except (
            yaml.YAMLError,
            ValueError,
            AttributeError,
            RecursionError,
        ) as error:  # PyYAML raises them for dates, numbers and depth
            raise UserError(f"{file}: is not valid YAML ({' '.join(str(error).split())[:200]})") from None
        try:
            models = versions_of(body)
        except UserError as error:
            raise UserError(f"{file}: {error}") from None
        return [
            Wanted(name, entry.version, self._of_entry(entry.archive, file.parent), entry.weight)
            for name, versions in models.items()
            for entry in versions
        ]


def _existing_archive(path: Path, hint: str = "") -> Path:
    """Return the path of an archive.

    Raises:
        UserError: the file does not exist. ``hint`` ends the message.
    """
    try:
        there = path.is_file()
    except OSError as error:  # the name is too long, or the folder may not be read
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if not there:
        raise UserError(f"{path}: there is no such archive{hint}")
    return path
