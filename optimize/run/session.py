"""Makes a baseline and applies passes to it, or takes their results from the store.

The result of a pass has no name: its key depends on its inputs. An artifact adds a name and a card, in a folder that
shares the files. Another name costs only milliseconds, however long the pass took.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from optimize.context import Context
from optimize.data.augmentation_choice import IN_WORDS
from optimize.export.onnx_graph.ending import with_ending
from optimize.export.sparsity import sparsity
from optimize.measure.key_inputs import timing_here
from optimize.measure.machine import installed_version, machine, versions
from optimize.memory import collect
from optimize.models.built_network import architecture_of
from optimize.models.checkpoint import Checkpoint
from optimize.models.preprocessing import ChosenPreprocessing
from optimize.models.source import ModelSource
from optimize.models.teacher import Teaching
from optimize.passes.base import Pass, find_pass, pass_of, zeros_are_meant
from optimize.quantization.targets import x86_target
from optimize.run.teachers import find_teacher
from optimize.store.artifact import (
    EAGER,
    GRAPHS,
    PRODUCT_FILE,
    Artifact,
    Kind,
    Made,
    Product,
    read_product,
    write_product,
)
from optimize.store.keys import BaselineKey, Key, NamedKey, StageKey, content
from optimize.store.locks import Hold
from optimize.store.objects import Store, StoredObject
from optimize.store.sources import code_of
from optimize.store.training_history import History
from optimize.training.baseline import make_baseline, new_module
from optimize.training.config import TrainingConfig, distillations, in_words, inputs, suited, trains
from optimize.training.tensorboard_events import write_histories
from serve.common.config import Config
from serve.runtime.card.card import Ancestor, Card, read_card, write_card
from serve.runtime.display import Described
from serve.runtime.errors import UserError
from serve.runtime.tasks.base import find_task

BASELINE = "baseline"

BuildModule = Callable[[], torch.nn.Module]


@dataclass(frozen=True, repr=False)
class Step(Described):
    """An artifact, whether it came from the store, and how many seconds it took to make.

    ``created`` is when it was made, ISO 8601 in UTC. ``training`` is the history of each training behind it.
    """

    artifact: Artifact
    cached: bool
    seconds: float
    created: str
    training: tuple[History, ...] = ()

    def _facts(self) -> dict[str, str]:
        taken = "from the store" if self.cached else f"{self.seconds:.1f} s"
        return {"artifact": self.artifact.name, "made": self.created, "took": taken}


@dataclass(frozen=True)
class Planned:
    """An artifact before it is made.

    Attributes:
        name: its name.
        kind: its kind.
        operation: the pass, or ``baseline``.
        settings: the settings of the operation.
        key: the key of all its inputs.
        ancestors: its lineage, if there is no parent object that has it.
    """

    name: str
    kind: Kind
    operation: str
    settings: Mapping[str, Any]
    key: str
    ancestors: tuple[Ancestor, ...] = ()


@dataclass(frozen=True, repr=False)
class Session(Described):
    """Everything that the steps of one run share. Nothing is pruned from its store as long as it lives.

    Attributes:
        store: keeps the artifacts.
        source: the model's architecture.
        context: data, preprocessing, device, seed, listener.
        waiting: called with a name when another process is making the same artifact.
        reopen: opens an equal session in another process, for pickling. None if text cannot describe the session.
        origins: where each part of the preprocessing comes from, in words.
    """

    store: Store
    source: ModelSource
    context: Context
    waiting: Callable[[str], None] = lambda name: None
    reopen: Callable[[], Session] | None = field(default=None, compare=False)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    _hold: Hold = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hold", self.store.hold())

    def __reduce__(self) -> tuple[Callable[[], Session], tuple[()]]:
        if self.reopen is None:
            raise UserError(
                f"the session of {self.source.name} cannot be pickled: it has a module or data set that exists "
                "only in this process"
            )
        return self.reopen, ()

    def _facts(self) -> dict[str, str]:
        return {
            "model": self.source.name,
            "data": self.context.data.name,
            "device": str(self.context.device),
            "seed": str(self.context.seed),
            "store": str(self.store.root),
            "preprocessing": str(self.preprocessing),
            "training images": IN_WORDS[self.context.data.augment],
        }

    @property
    def preprocessing(self) -> ChosenPreprocessing:
        """Return how images reach the network, and where each part of that comes from."""
        return ChosenPreprocessing(self.context.preprocessing, self.origins)

    @functools.cached_property
    def architecture(self) -> tuple[str, str]:
        """Return what identifies the network's code in keys; see `architecture_of`."""
        return architecture_of(self.source, self.context.width, self.context.preprocessing)

    def close(self) -> None:
        """Allow others to prune the store, even if artifacts of this session are still alive."""
        self._hold.close()

    def baseline(
        self,
        config: TrainingConfig | None = None,
        checkpoint: Checkpoint | None = None,
        origin: Path | None = None,
    ) -> Step:
        """Return the float32 model: with the checkpoint's weights, or trained here with ``config``.

        Args:
            config: how to train if there is no checkpoint. What it does not set is as suits the model and its task.
            checkpoint: the weights. They must fit the data's number of classes.
            origin: the checkpoint's path, for messages.

        Raises:
            UserError: the checkpoint does not fit.
        """
        given = {} if config is None else {name: getattr(config, name) for name in config.model_fields_set}
        config = TrainingConfig(**{**self._suiting(), **given})
        training = None if checkpoint else inputs(config)
        teaching = None if checkpoint else self.teaching(config, None)
        key = BaselineKey(
            architecture=self.architecture,
            weights=(checkpoint.sha256, checkpoint.place) if checkpoint else None,
            training=training,
            processes=1 if checkpoint else self.context.processes,
            teacher=teaching.digest if teaching else None,
            outputs=self.context.outputs,
            libraries=_versions(("torch", "torchvision")),
            code=code_of(make_baseline),
            **self.surroundings(),
        )

        def write(folder: Path) -> Product:
            context = self._keeping(key, BASELINE, teaching)
            return make_baseline(self.source, context, checkpoint or in_words(config), folder, origin=origin)

        settings: dict[str, Any] = config.model_dump(mode="json")
        if checkpoint is not None:
            settings = {"checkpoint": checkpoint.sha256, "place": checkpoint.place}
        return self._obtain(Planned(BASELINE, "module", BASELINE, settings, key.digest), write, None)

    def _suiting(self) -> dict[str, Any]:
        """Return the settings of training that suit the model and its task."""
        return {**self.context.task.training, **self.source.training}

    def teaching(
        self, config: Config, parent: Artifact | None, others: Mapping[str, Artifact] | None = None
    ) -> Teaching | None:
        """Return the teacher of these settings, or None. See `find_teacher`.

        Raises:
            UserError: as in `find_teacher`, or there are two teachers.
        """
        found = [find_teacher(each, self.context, parent, others or {}) for each in distillations(config)]
        if len({each.digest for each in found}) > 1:
            names = " and ".join(each.named for each in distillations(config))
            raise UserError(f"distil.teacher: the trainings of a pass must have one teacher, not {names}")
        return found[0] if found else None

    def check(self, config: Config) -> None:
        """Check whether a pass's settings fit the model, without making anything.

        Raises:
            UserError: the settings name something that the model does not have.
        """
        step: Pass[Any] = pass_of(config)
        if step.check is not None:
            step.check(functools.partial(first_module, self), config)

    def apply(
        self,
        parent: Artifact,
        config: Config,
        name: str | None = None,
        others: Mapping[str, Artifact] | None = None,
    ) -> Step:
        """Run the pass that ``config`` belongs to on ``parent``, or take its result from the store.

        Args:
            parent: the artifact to run it on. The pass must accept its kind.
            config: the pass's settings.
            name: the artifact's name. By default the pass's name.
            others: further artifacts that may teach, by name, besides the ancestors of ``parent``.

        Raises:
            UserError: the pass cannot follow ``parent``, or the teacher does not exist.
            NotApplicableError: the pass has nothing to do here.
            PassError: the result breaks a promise of the pass.
        """
        step: Pass[Any] = pass_of(config)
        if (reason := step.refuses(parent.kind)) is not None:
            raise UserError(reason)
        if parent.parent is None and parent.kind != "module":
            raise UserError(
                f"{step.name} needs the artifact that {parent.name} was made from, which is not in the store "
                f"{self.store.root}: {parent.name} was loaded from a folder"
            )
        config = suited(config, self._suiting())
        self.check(config)
        teaching = self.teaching(config, parent, others)
        settings = config.model_dump(mode="json")
        zeros = step.leaves_zeros or zeros_are_meant(parent)
        key = StageKey(
            operation=step.name,
            config=inputs(config),
            ancestors=tuple(content(artifact.card) for artifact in parent.line()),
            target=x86_target().name,
            device=self.context.device.type if step.reads_device else None,
            architecture=self.architecture if trains(config) else None,
            processes=self.context.processes if trains(config) else 1,
            zeros=code_of(sparsity) if zeros else None,
            ending=code_of(with_ending, find_task(self.context.data.task)) if step.yields in GRAPHS else None,
            timed=timing_here(*timed) if (timed := step.timed(config)) else None,
            teacher=teaching.digest if teaching else None,
            libraries=_versions((*step.libraries, *step.more_libraries(config))),
            code=step.source_digest(),
            **self.surroundings(),
        )

        def write(folder: Path) -> Product:
            context = self._keeping(key, planned.name, teaching, parent)
            torch.manual_seed(self.context.seed)
            product: Product = step.apply(parent, in_words(config), context, folder)
            if product.format == "onnx":
                product = with_ending(product, folder, context, parent.card.outputs)
            return _with_zeros_counted(product, folder) if zeros else product

        planned = Planned(name or step.name, step.yields, step.name, settings, key.digest)
        obtained = self._obtain(planned, write, parent)
        collect(sum(file.stat().st_size for file in parent.folder.iterdir()))
        return obtained

    def _keeping(self, key: Key, name: str, teaching: Teaching | None, parent: Artifact | None = None) -> Context:
        """Return the context for making the object of this key: it can resume, and its teacher is open.

        ``name`` is the folder of its TensorBoard events.
        """
        return dataclasses.replace(
            self.context,
            unfinished=self.store.unfinished(key.digest),
            tensorboard=self._events(name),
            teacher=teaching.open() if teaching else None,
            store=self.store,
            probabilities=parent.card.probabilities if parent else "softmax",
        )

    def _events(self, name: str) -> Path | None:
        """Return the folder for the TensorBoard events of an artifact's trainings."""
        return self.context.tensorboard / name if self.context.tensorboard is not None else None

    def surroundings(self) -> dict[str, Any]:
        """Return the inputs that the keys of everything made from the model and its data share; see `Making`."""
        data = self.context.data
        return {
            "classes": len(data.classes),
            "images": data.train.fingerprint,
            "augmentation": data.augment,
            "preprocessing": self.context.preprocessing,
            "seed": self.context.seed,
        }

    def _obtain(self, planned: Planned, write: Callable[[Path], Product], parent: Artifact | None) -> Step:
        """Make or find what is planned, and give it its name."""

        def make(folder: Path) -> None:
            write_product(Made(write(folder), versions(), machine(self.context.device)), folder)

        about = self._about(planned.name)
        made = self.store.obtain(planned.key, make, lambda: self.waiting(planned.name), about=about)
        step = self.named(planned, made, parent)
        if made.cached:
            write_histories(step.training, self._events(planned.name))
        return step

    def named(
        self,
        planned: Planned,
        made: StoredObject,
        parent: Artifact | None,
        build_module: BuildModule | None = None,
    ) -> Step:
        """Give a made object its name: a folder that shares its files, with a card.

        Args:
            planned: its name and its inputs.
            made: the object that is stored under the planned key.
            parent: the artifact that it was made from, if it is known.
            build_module: builds an eager module of its structure. By default the parent's module, rebuilt.
        """
        known = read_product(made.folder)
        card = self._card(planned, made, known, parent)

        def name_it(folder: Path) -> None:
            for file in card.files:
                self.store.link(made.folder / file, folder / file)
            write_card(folder, card)

        key = NamedKey(made=planned.key, card=dataclasses.asdict(card)).digest
        found = self.store.obtain(key, name_it, about=self._about(planned.name))
        own = card.lineage[-1]
        if build_module is None and own.operation == BASELINE:
            build_module = functools.partial(first_module, self, own.structure)
        elif build_module is None and parent is not None and planned.kind in EAGER:
            build_module = functools.partial(rebuilt, self, own, parent)
        artifact = Artifact(
            planned.name,
            planned.kind,
            planned.key,
            found.folder,
            read_card(found.folder),
            parent,
            build_module,
            objects=(planned.key, key),
        )
        return Step(artifact, made.cached, made.seconds, made.created, known.product.training)

    def _about(self, name: str) -> str:
        return f"{self.source.name} on {self.context.data.name}: {name}"

    def _card(self, planned: Planned, stored: StoredObject, made: Made, parent: Artifact | None) -> Card:
        product, data = made.product, self.context.data
        return Card(
            name=planned.name,
            model=self.source.name,
            task=data.task,
            format=product.format,
            file=product.file,
            precision=product.precision,
            input_dtype=product.input_dtype,
            device=product.device,
            target=product.target,
            probabilities=parent.card.probabilities if parent else product.probabilities,
            outputs=parent.card.outputs if parent else product.outputs,
            ending=product.ending,
            preprocessing=self.context.preprocessing,
            classes=data.classes,
            files={name: digest for name, digest in stored.files.items() if name != PRODUCT_FILE},
            lineage=(
                *(parent.card.lineage if parent else planned.ancestors),
                Ancestor(planned.name, planned.operation, planned.settings, planned.key, product.structure),
            ),
            data={
                "name": data.name,
                "fingerprint": data.fingerprint,
                "train": len(data.train),
                "val": len(data.val),
                **self.context.task.facts(),
                **({"class_order": list(data.order)} if data.order else {}),
                **({"notes": list(data.notes)} if data.notes else {}),
            },
            versions=made.versions,
            machine=made.machine,
            notes=product.notes,
        )


def _with_zeros_counted(product: Product, folder: Path) -> Product:
    """Add a note about the zeros in the product's file, whatever earlier passes promised."""
    found = sparsity(folder, product.file, product.format)
    if found is None or (note := found.words(product.file)) in product.notes:
        return product
    return dataclasses.replace(product, notes=(*product.notes, note))


def _versions(libraries: tuple[str, ...]) -> dict[str, str | None]:
    known = versions()
    return {name: known.get(name) or installed_version(name) for name in (*libraries, "optimize")}


def first_module(session: Session, structure: Mapping[str, Any] = MappingProxyType({})) -> torch.nn.Module:
    """Build the model with random weights. ``structure`` is the structure that the baseline's lineage records."""
    return new_module(session.source, session.context, structure.get("ending", "logits"))


def rebuilt(session: Session, step: Ancestor, parent: Artifact) -> torch.nn.Module:
    """Return a module of the structure that a pass gave to ``parent``'s."""
    return find_pass(step.operation).rebuilt(parent.module(), session.context.example(), step.structure)
