"""The Python API for experiments: load, apply passes, compare, save, package.

Every variant goes through the same store as ``make optimize``: one that was made there or here before is
not made again.
"""

from __future__ import annotations

import io
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from optimize.listener import Silent
from optimize.measure.bench import Bench
from optimize.measure.latency import Timing
from optimize.passes.base import pass_of
from optimize.report.table import table
from optimize.run.job import Job, open_job
from optimize.run.recipe import Recommend
from optimize.run.recommendation import Recommendation, recommend
from optimize.run.results import Entry, measure
from optimize.run.session import Session, Step
from optimize.store.artifact import Artifact
from optimize.training.loop import TrainingConfig
from serve.archive import ServingOptions, build_archive
from serve.config import Config
from serve.runtime.card import CARD_FILE
from serve.runtime.errors import UserError
from serve.runtime.predictor import Predictor

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Variant:
    """One variant of a model: its artifact, and the session (data, device, store) that it belongs to."""

    session: Session
    step: Step

    @property
    def name(self) -> str:
        """Its name in tables."""
        return self.artifact.name

    @property
    def artifact(self) -> Artifact:
        """Its files and card."""
        return self.step.artifact

    def predictor(self) -> Predictor:
        """Opened by the serving runtime on the session's device: encoded images to labels.

        Raises:
            EngineError: it cannot run on this device.
        """
        return Predictor(self.artifact.folder, self.session.context.device)


@dataclass(frozen=True)
class Comparison:
    """Variants measured side by side; prints as a table.

    ``rows`` has a dict per variant, with the fields of ``report.json``; ``baselines`` the eager references;
    ``recommendation`` which variant to take, by which rule.
    """

    model: str
    rows: list[dict[str, Any]]
    baselines: list[dict[str, Any]]
    recommendation: Recommendation

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=120)
        report = {
            "run": self.model,
            "artifacts": self.rows,
            "baselines": self.baselines,
            "recommended": self.recommendation.name,
            "recommendation": {"rule": self.recommendation.rule},
        }
        console.print(table(report))
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    def to_pandas(self) -> pd.DataFrame:
        """One row per variant, indexed by name; nested fields become columns such as ``latency_ms.p50``."""
        import pandas

        return pandas.json_normalize(self.rows).set_index("name")


def load(
    model: str,
    *,
    checkpoint: str | Path | None = None,
    data: str = "digits",
    weights: str | None = None,
    training: TrainingConfig | None = None,
    store: str | Path = "model_store",
    device: str = "auto",
    image_size: int | None = None,
    seed: int = 0,
    trust_checkpoint: bool = False,
) -> Variant:
    """The baseline: a model with its checkpoint, or trained here.

    Args:
        model: a torchvision classifier, ``path/to/file.py:factory`` or ``package.module:factory``.
        checkpoint: a file of weights.
        data: ``digits``, ``imagefolder:DIR`` or a torchvision data set.
        weights: torchvision's own, such as ``DEFAULT``, instead of a checkpoint.
        training: how to train where there are no weights.
        store: where artifacts are kept.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        image_size: side of the network's input in pixels.
        seed: of every random choice.
        trust_checkpoint: let the checkpoint's pickle run code.

    Raises:
        UserError: something is missing, unreadable, or does not fit.
    """
    job = Job(
        model=model,
        checkpoint=Path(checkpoint) if checkpoint is not None else None,
        data=data,
        store=Path(store),
        device=device,
        image_size=image_size,
        weights=weights,
        trust_checkpoint=trust_checkpoint,
        seed=seed,
    )
    opened = open_job(job, Silent())
    return Variant(opened.session, opened.session.baseline(training, opened.checkpoint, opened.origin))


def apply(parent: Variant, config: Config, name: str | None = None) -> Variant:
    """Run the pass that ``config`` belongs to.

    Args:
        parent: what to run it on.
        config: a pass's settings, such as ``Ptq(observer="minmax")``.
        name: the variant's name; by default the pass's, with the settings that differ from its defaults.

    Raises:
        UserError: the pass cannot follow this parent.
        NotApplicableError: it has nothing to do for this model or machine.
        PassError: its result is not what it promises.
    """
    return Variant(parent.session, parent.session.apply(parent.artifact, config, name or _name(config)))


def compare(*variants: Variant, timing: Timing | None = None, max_drop: float = Recommend().max_drop) -> Comparison:
    """Measure variants of one session side by side: accuracy, parity, speed, memory and size.

    Differences are to the first variant, which should be the float baseline; speed is measured in
    interleaved rounds, together with eager references of the first.

    Args:
        variants: what to compare.
        timing: how speed is measured.
        max_drop: loss of top-1, as a fraction, that an artifact's interval must exclude to be recommended.

    Raises:
        UserError: there are none, two share a name, or they come from different sessions.
    """
    if not variants:
        raise UserError("compare needs at least one variant")
    session = variants[0].session
    names = [variant.name for variant in variants]
    if any(variant.session is not session for variant in variants):
        raise UserError("compare takes variants that come from one load(): others have other data or another store")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"two variants are called {twice[0]!r}; give one another name: apply(…, name=…)")
    entries = [_entry(variant) for variant in variants]
    measured = measure(entries, Bench(session.store, session.context), timing or Timing(), Silent())
    return Comparison(
        session.source.name,
        measured.rows,
        measured.baselines,
        recommend(measured.rows, measured.speed.speeds, max_drop),
    )


def save(variant: Variant, folder: str | Path) -> Path:
    """Copy a variant's model file and card, and what else its card names, to ``folder``, which must not exist.

    Raises:
        UserError: ``folder`` exists or cannot be written.
    """
    target = Path(folder)
    try:
        target.mkdir(parents=True)
        for name in (*variant.artifact.card.files, CARD_FILE):
            shutil.copyfile(variant.artifact.folder / name, target / name)
    except FileExistsError:
        raise UserError(f"{target} exists already; choose another folder") from None
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror}") from None
    return target


def package(
    variant: Variant, path: str | Path, *, model_name: str | None = None, options: ServingOptions | None = None
) -> Path:
    """Pack a variant into a TorchServe archive.

    Args:
        variant: what to pack.
        path: the ``.mar`` to write.
        model_name: the name to serve it by; the file's by default.
        options: batching, threads and the handler's settings.

    Raises:
        UserError: the name is not a legal one, or ``path`` cannot be written.
    """
    target = Path(path)
    return build_archive(variant.artifact.folder, target, model_name=model_name or target.stem, options=options)


def _entry(variant: Variant) -> Entry:
    artifact = variant.artifact
    last = artifact.card.lineage[-1]
    parent = artifact.parent.name if artifact.parent else None
    return Entry(artifact.name, last.operation, parent, last.config, variant.step)


def _name(config: Config) -> str:
    """The pass's name and the settings that were given: ``ptq-observer-minmax``."""
    given = config.model_dump(mode="json", exclude_defaults=True)
    return "-".join([pass_of(config).name, *(f"{name}-{value}".replace("_", "") for name, value in given.items())])
