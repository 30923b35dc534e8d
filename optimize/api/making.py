"""Loads variants, makes them by passes, saves and restores their files, packs them."""

from __future__ import annotations

import contextlib
import os
import shutil
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import nn

from optimize.arguments import must_be, must_be_model, nearest_settings, step_name, step_names
from optimize.data.augmentation_choice import Augmentation
from optimize.data.from_python import image_data
from optimize.data.program_items import Data
from optimize.data.records import ImageData
from optimize.measure.rows import Skip
from optimize.models.preprocessing_config import PreprocessingConfig, Wish
from optimize.noise import silenced
from optimize.run.job import Job
from optimize.run.opened_job import open_job
from optimize.run.report_rows import not_made, skip_of
from optimize.run.saved_artifacts import take
from optimize.run.session import Session
from optimize.training.config import TrainingConfig
from optimize.training.distributed.first_process import only_first
from optimize.variant import Failed, Variant
from serve.common.config import Config
from serve.common.options import ServingOptions
from serve.common.progress import ProgressBar, here
from serve.runtime.card.card import CARD_FILE
from serve.runtime.errors import UserError
from serve.torchserve.archive_builder import build_archive


def load(
    model: str | nn.Module,
    *,
    checkpoint: str | Path | None = None,
    data: str | ImageData | Data | None = None,
    weights: str | None = None,
    training: TrainingConfig | None = None,
    store: str | Path = "model_store",
    device: str = "auto",
    image_size: int | None = None,
    weights_key: str | None = None,
    preprocessing: PreprocessingConfig | None = None,
    classes: str | Path | Sequence[str] | None = None,
    class_order: str | Path | Sequence[str] | None = None,
    augment: Augmentation | None = None,
    val_images: int | None = None,
    skip_unreadable: bool = False,
    accept_gaps: bool = False,
    seed: int = 0,
    processes: int | None = None,
    tensorboard: str | Path | None = None,
    trust_checkpoint: bool = False,
    outputs: Sequence[str] | None = None,
) -> Variant:
    """Return the baseline variant: a model with its checkpoint, or a model trained here.

    Args:
        model: a network's name (torchvision's, ``cnn_small``, ``unet_small`` or ``timm:NAME``),
            ``path/to/file.py:factory``, ``package.module:factory``, or an ``nn.Module``, which is copied with its
            weights.
        checkpoint: a file of weights.
        data: ``digits``, ``imagefolder:DIR`` or a torchvision data set. By default ``digits``, or the data without a
            download of the network's task. You can also pass a ``Dataset``, a
            ``DataLoader``, or a pair of images and labels. `image_data` wraps these with facts that must be stated.
        weights: torchvision's own weights, such as ``DEFAULT``, instead of a checkpoint.
        training: how to train if there are no weights.
        store: the folder that keeps artifacts.
        device: where to train and calibrate: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        image_size: height and width of the network's input in pixels.
        weights_key: which weights of the checkpoint to take: their key in the file, such as ``model`` or
            ``state_dict_ema``, or the prefix of their names, such as ``teacher.``. By default averaged ones, if any.
        preprocessing: preprocessing settings that replace those of the model and the data.
        classes: the names of the classes in their order, or a text file with one name a line. By default the data's.
        class_order: which output means which class: ``data`` (the data's order), ``sorted``, ``natural``,
            ``checkpoint``, a text file with one name a line, or the names. By default the checkpoint's order if it
            states one, else the data's.
        augment: random changes of training images: ``none``, ``shift`` or ``shift+flip``. The default depends on the
            data. A folder of images is not mirrored.
        val_images: the number of validation images to measure accuracy on, drawn evenly from the classes. By default
            all.
        skip_unreadable: leave out validation images that cannot be read, instead of raising an error.
        accept_gaps: accept incomplete data, such as data without images of a class, instead of raising an error.
        seed: the seed of every random choice.
        processes: the number of processes on this machine that train together, here and in ``qat``. On GPUs each
            process has one GPU. By default one. In a script that torchrun started, all of its processes train together.
        tensorboard: a folder for TensorBoard events of training, with a folder in it for each artifact.
        trust_checkpoint: allow the checkpoint's pickle to run code.
        outputs: names of the network's outputs to keep, the class logits first: keys, fields or numbers of what its
            forward returns. By default the output called ``logits``, or the only one.

    Raises:
        UserError: something is missing, cannot be read, or does not fit.
    """
    only_first()
    must_be_model(model)
    with silenced():
        bar = here()
        try:
            job = Job(
                model=model,
                checkpoint=_path("checkpoint", checkpoint) if checkpoint is not None else None,
                data=data if isinstance(data, str | ImageData | None) else _held(data, seed, bar),
                classes=Path(classes) if isinstance(classes, str) else classes,
                class_order=class_order if isinstance(class_order, str | Path | None) else tuple(class_order),
                val_images=val_images,
                augment=augment,
                skip_unreadable=skip_unreadable,
                accept_gaps=accept_gaps,
                store=_path("store", store),
                device=device,
                image_size=image_size,
                weights=weights,
                weights_key=weights_key,
                preprocessing=Wish(preprocessing, "your setting {}") if preprocessing is not None else None,
                trust_checkpoint=trust_checkpoint,
                outputs=",".join(outputs) if outputs is not None else None,
                seed=seed,
                processes=processes,
                tensorboard=_path("tensorboard", tensorboard) if tensorboard is not None else None,
            )
            opened = open_job(job, bar)
        except BaseException:
            bar.close()
            raise
        with _shown(opened.session, "baseline"):
            return Variant(opened.session, opened.session.baseline(training, opened.checkpoint, opened.origin))


def apply(parent: Variant, config: Config, name: str | None = None) -> Variant:
    """Run the pass that ``config`` belongs to.

    Args:
        parent: the variant to run the pass on.
        config: the settings of a pass, such as ``Ptq(observer="minmax")``.
        name: the name of the new variant. By default the pass's name with a short form of the changed settings.

    Raises:
        UserError: the pass cannot follow this parent.
        NotApplicableError: the pass has nothing to do for this model or on this machine.
        PassError: the result breaks a promise of the pass.
    """
    must_be(Variant, parent, "apply takes a variant, which load() returns")
    must_be(Config, config, f"apply takes the settings of a pass, such as opt.{nearest_settings(config)}()")
    wanted = name or step_name(config)
    with silenced(), _shown(parent.session, wanted):
        return Variant(parent.session, parent.session.apply(parent.artifact, config, wanted))


def apply_each(parent: Variant | Failed, configs: Sequence[Config] | Mapping[str, Config]) -> list[Variant | Failed]:
    """Run several passes, or one pass with several settings, each on ``parent``. A failure does not stop the others.

    Args:
        parent: the variant to run the passes on. If it failed itself, every result is a failure.
        configs: the settings of the passes: a mapping from names, or a sequence, whose names come from the differences.

    Returns:
        A variant for each settings, or a `Failed` with the reason. ``compare`` accepts both, with a row for each.

    Raises:
        UserError: an item is not the settings of a pass.
    """
    must_be((Variant, Failed), parent, "apply_each takes a variant, which load() returns")
    must_be((Sequence, Mapping), configs, "apply_each takes settings of passes, such as [opt.Ptq()]")
    each = list(configs.values() if isinstance(configs, Mapping) else configs)
    for config in each:
        must_be(Config, config, f"apply_each takes settings of passes, such as opt.{nearest_settings(config)}()")
    names = list(configs) if isinstance(configs, Mapping) else step_names(each)
    for name in names:
        must_be(str, name, "apply_each takes settings by name, such as {'fewer-images': opt.Ptq(images=128)}")
    return [_made_or_failed(parent, config, name) for config, name in zip(each, names, strict=True)]


def _made_or_failed(parent: Variant | Failed, config: Config, name: str) -> Variant | Failed:
    if isinstance(parent, Failed):
        skip = Skip(kind="parent_skipped", reason=f"its parent {parent.name} failed: {parent.reason}")
        return Failed(parent.session, not_made(name, config, parent.name, skip))
    try:
        return apply(parent, config, name)
    except Exception as error:  # noqa: BLE001 - whatever a library raises on one of them must not cost the others
        row = not_made(name, config, parent.name, skip_of(error))
        return Failed(parent.session, row, "".join(traceback.format_exception(error)))


def save(variant: Variant, folder: str | Path) -> Path:
    """Copy a variant's model file, its card and the other files that the card names to a new ``folder``.

    Raises:
        UserError: ``folder`` exists or cannot be written, or ``variant`` is not a variant.
    """
    must_be(Variant, variant, "save takes a variant, which load() and apply() return")
    target = Path(folder)
    try:
        target.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"{target} exists already; choose another folder") from None
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror}") from None
    try:
        for name in (*variant.artifact.card.files, CARD_FILE):
            shutil.copyfile(variant.artifact.folder / name, target / name)
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)  # half a copy would block the next attempt
        if isinstance(error, OSError):
            raise UserError(f"{target} cannot be written: {error.strerror}") from None
        raise
    return target


def restore(base: Variant, folder: str | Path) -> Variant:
    """Load what `save` wrote, to measure it, pack it, or apply passes to it.

    Args:
        base: a variant of the same model and data, as `load` returns it.
        folder: the saved folder. It is checked against its card.

    Raises:
        UserError: the folder is not a complete artifact, or its model, classes or preprocessing differ.
    """
    must_be(Variant, base, "restore takes a variant of the same model and data, which load() returns")
    with silenced():
        return Variant(base.session, take(base.session, Path(folder)))


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
        UserError: the name is not a legal one, or ``path`` cannot be written, or this is no variant.
    """
    must_be(Variant, variant, "package takes a variant, which load() and apply() return")
    target = Path(path)
    return build_archive(variant.artifact.folder, target, model_name=model_name or target.stem, options=options)


def _path(setting: str, given: str | Path) -> Path:
    """Return a path from an argument of the API.

    Raises:
        UserError: it is not a path, for instance a state dict instead of its file.
    """
    must_be((str, os.PathLike), given, f"{setting}: must be a path")
    return Path(given)


def _held(data: Data, seed: int, bar: ProgressBar) -> ImageData:
    """Turn a program's own data into a data set, and show the progress of reading it."""
    bar.started("reading")
    return image_data(data, seed=seed, told=lambda share: bar.progressed(share, "images"))


@contextlib.contextmanager
def _shown(session: Session, name: str) -> Iterator[None]:
    """Show the progress of a step, and end the display however the step ends."""
    listener = session.context.listener
    listener.started(name)
    try:
        yield
    finally:
        listener.ended(name, 0.0, cached=False, skipped=None)
