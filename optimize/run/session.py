"""Steps through the store: a baseline and the passes on it, each taken from the cache or made once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from optimize.context import Context
from optimize.export.program import write_program, write_weights
from optimize.measure.machine import machine, versions
from optimize.models.checkpoint import Checkpoint
from optimize.models.fitting import load_into
from optimize.models.source import ModelSource
from optimize.passes.base import Pass, pass_of
from optimize.quantization.targets import x86_target
from optimize.store.artifact import Artifact, Kind, Product
from optimize.store.keys import make_key
from optimize.store.objects import Store
from optimize.store.sources import source_digest
from optimize.training.loop import TrainingConfig, train
from serve.config import Config
from serve.runtime.card import Ancestor, Card, load_card, sha256_file, write_card
from serve.runtime.errors import UserError, one_line

BASELINE = "baseline"

_SEEN = (
    "the checkpoint has probably been trained on the images that a training pass here holds out to choose its best "
    "epoch: their top-1 is too high, and only the evaluation images tell the accuracy"
)


@dataclass(frozen=True)
class Step:
    """An artifact, whether it came from the cache, and how many seconds it took when it was made."""

    artifact: Artifact
    cached: bool
    seconds: float


@dataclass(frozen=True)
class Session:
    """Everything that the steps of one run share.

    Attributes:
        store: where artifacts are kept.
        source: the model's architecture.
        context: data, preprocessing, device, seed, listener.
        waiting: called with a name when another process is making the same artifact.
    """

    store: Store
    source: ModelSource
    context: Context
    waiting: Callable[[str], None] = lambda name: None

    def baseline(
        self, config: TrainingConfig | None = None, checkpoint: Checkpoint | None = None, origin: Path | None = None
    ) -> Step:
        """The float32 model: with the checkpoint's weights, or trained here with ``config``.

        Args:
            config: how to train where there is no checkpoint.
            checkpoint: the weights; must fit the data's number of classes.
            origin: the checkpoint's path, for messages.

        Raises:
            UserError: the checkpoint does not fit.
        """
        config = config or TrainingConfig()
        settings: dict[str, Any] = config.model_dump(mode="json")
        if checkpoint is not None:
            settings = {"checkpoint": checkpoint.sha256, "place": checkpoint.place}

        def build_module() -> torch.nn.Module:
            return self.source.build(len(self.context.data.classes), self.context.preprocessing.crop[0])

        def write(folder: Path) -> Product:
            torch.manual_seed(self.context.seed)
            module = build_module()
            notes: tuple[str, ...] = ()
            if checkpoint is not None:
                bridged = load_into(module, checkpoint, origin or Path("checkpoint"))
                for note in bridged:
                    self.context.listener.said(f"{origin or 'checkpoint'}: {note}")
                notes = (f"weights of a checkpoint, SHA-256 {checkpoint.sha256}", *checkpoint.notes, *bridged, _SEEN)
            else:
                result = train(module, self.context, config)
                best = result.epochs[result.best]
                notes = (
                    f"trained here: best of {len(result.epochs)} epochs is {result.best + 1}, "
                    f"top-1 {best.held_out_top1:.4f} on {result.held_out_images} held-out training images",
                    *result.notes,
                )
            module = module.cpu().eval()
            example = self.context.example()
            _check_output(module, example, len(self.context.data.classes))
            write_weights(module, folder)
            file, file_format = write_program(module, example, folder)
            return Product(file, file_format, "float32", notes=notes)

        key = make_key(
            operation=BASELINE,
            config=settings,
            # One file may hold many factories.
            model=[self.source.name, self.source.fingerprint],
            code=source_digest("optimize.training.loop", "optimize.export.program", "optimize.models.fitting"),
            **self._environment("training", ("torch", "torchvision")),
        )
        return self._obtain(BASELINE, "module", BASELINE, settings, key, write, None, build_module)

    def apply(self, parent: Artifact, config: Config, name: str | None = None) -> Step:
        """Run the pass that ``config`` belongs to on ``parent``, or take its result from the cache.

        Args:
            parent: what to run it on; must be of a kind that the pass accepts.
            config: the pass's settings.
            name: the artifact's name; the pass's own by default.

        Raises:
            UserError: the pass cannot follow ``parent``.
            NotApplicableError: it has nothing to do here.
            PassError: its result is not what it promises.
        """
        step: Pass[Any] = pass_of(config)
        if (reason := step.refuses(parent.kind)) is not None:
            raise UserError(reason)
        settings = config.model_dump(mode="json")
        build_module = None
        if step.rebuild is not None:
            build_module = functools.partial(_rebuild, step, parent, self.context)
        key = make_key(
            operation=step.name,
            config=settings,
            parent=parent.card.content,
            code=step.source_digest(),
            **self._environment(step.data, step.libraries),
        )

        def write(folder: Path) -> Product:
            torch.manual_seed(self.context.seed)
            product: Product = step.apply(parent, config, self.context, folder)
            return product

        return self._obtain(name or step.name, step.yields, step.name, settings, key, write, parent, build_module)

    def _environment(self, data: str, libraries: tuple[str, ...]) -> dict[str, Any]:
        """The part of a key that all steps have: data, preprocessing, seed, device, target, versions."""
        known = versions()
        return {
            # Even a pass that trains nothing is traced, checked and sized with images of the data.
            "data": self.context.data.fingerprint,
            "reads": data,
            "classes": self.context.data.classes,
            "preprocessing": _plain(self.context.preprocessing),
            "seed": self.context.seed,
            "device": self.context.device.type,
            "target": x86_target().name,
            "versions": {name: known.get(name) for name in (*libraries, "optimize")},
        }

    def _obtain(  # noqa: PLR0917 - one call each from baseline and apply
        self,
        name: str,
        kind: Kind,
        operation: str,
        settings: dict[str, Any],
        key: str,
        write: Callable[[Path], Product],
        parent: Artifact | None,
        build_module: Callable[[], torch.nn.Module] | None,
    ) -> Step:
        # The name is part of the object, because the card states it; renaming a stage is cheap to redo.
        key = make_key(key=key, name=name, lineage=[entry.key for entry in parent.card.lineage] if parent else [])

        def build(folder: Path) -> None:
            product = write(folder)
            card = Card(
                name=name,
                model=self.source.name,
                format=product.format,
                file=product.file,
                precision=product.precision,
                input_dtype=product.input_dtype,
                device=product.device,
                preprocessing=self.context.preprocessing,
                classes=self.context.data.classes,
                files={path.name: sha256_file(path) for path in sorted(folder.iterdir())},
                lineage=(*(parent.card.lineage if parent else ()), Ancestor(name, operation, settings, key)),
                data={
                    "name": self.context.data.name,
                    "fingerprint": self.context.data.fingerprint,
                    "train": len(self.context.data.train),
                    "val": len(self.context.data.val),
                },
                versions=versions(),
                machine=machine(self.context.device),
                notes=product.notes,
            )
            write_card(folder, card)

        stored = self.store.obtain(key, build, lambda: self.waiting(name))
        card = load_card(stored.folder)
        return Step(Artifact(name, kind, key, stored.folder, card, parent, build_module), stored.cached, stored.seconds)


def _rebuild(step: Pass[Any], parent: Artifact, context: Context) -> torch.nn.Module:
    assert step.rebuild is not None
    return step.rebuild(parent.module(), context.example())


def _check_output(module: torch.nn.Module, example: torch.Tensor, classes: int) -> None:
    """Refuse a module that does not map ``(N, C, H, W)`` to ``(N, classes)``."""
    try:
        with torch.no_grad():
            output = module(example)
    except Exception as error:  # noqa: BLE001 - the user's forward may raise anything
        raise UserError(f"the model fails on an input of shape {tuple(example.shape)}: {one_line(error)}") from None
    if not isinstance(output, torch.Tensor) or output.shape != (len(example), classes):
        found = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise UserError(
            f"the model gives {found} for a batch of {len(example)} images of {classes} classes; "
            f"it must give logits of shape ({len(example)}, {classes})"
        )


def _plain(value: Any) -> Any:
    """A dataclass as JSON values."""
    return {name: list(item) if isinstance(item, tuple) else item for name, item in vars(value).items()}
