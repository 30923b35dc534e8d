"""The Python API for experiments: load, apply passes, compare, save, package.

Every variant goes through the same store as ``make optimize``: one that was made there or here before is
not made again.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from optimize.arguments import differences, must_be, must_be_model, nearest_settings, step_name
from optimize.data.formats.base import DEFAULT_DATA
from optimize.data.from_python import Data, image_data
from optimize.data.records import Augmentation, ImageData
from optimize.measure.bench import Bench
from optimize.measure.machine import measured_devices, resolve_device
from optimize.measure.rows import Results
from optimize.measure.timing import Timing
from optimize.measure.wanted import check_wanted
from optimize.models.preprocessing import PreprocessingConfig, Wish
from optimize.noise import silenced
from optimize.passes.base import find_pass
from optimize.passes.ptq import Ptq
from optimize.precision.methods import MethodName
from optimize.precision.records import Found, Sensitivity
from optimize.precision.search import Search
from optimize.precision.search import search as _search
from optimize.precision.sensitivity import ONE_IMAGE, subject
from optimize.precision.sensitivity import sensitivity as _sensitivity
from optimize.profiling.profiling import float_program, profile_artifact
from optimize.profiling.records import Profiled
from optimize.report.comparison import Comparison
from optimize.run.comparing import compare_runs as _compare_runs
from optimize.run.floats import graph_of
from optimize.run.job import Job, open_job
from optimize.run.recommendation import Objective, Recommend, recommend
from optimize.run.results import measure as measure_steps
from optimize.run.saved import take
from optimize.run.session import Session
from optimize.training.config import TrainingConfig
from optimize.variant import Variant
from serve.config import Config
from serve.options import ServingOptions
from serve.progress import ProgressBar, here
from serve.runtime.card import CARD_FILE
from serve.runtime.described import Described
from serve.runtime.errors import UserError
from serve.runtime.execution import Execution
from serve.torchserve.archive import build_archive

_RULE = Recommend()


@dataclass(frozen=True, repr=False)
class Searched(Described):
    """What `search` found: the record of it, and the chosen artifact; None where nothing keeps the budget."""

    found: Found
    variant: Variant | None

    def __str__(self) -> str:
        return "\n".join(self.found.why)

    def _facts(self) -> dict[str, str]:
        return self.found._facts()

    def _more(self) -> dict[str, str]:
        return self.found._more()


def load(
    model: str | nn.Module,
    *,
    checkpoint: str | Path | None = None,
    data: str | ImageData | Data = DEFAULT_DATA,
    weights: str | None = None,
    training: TrainingConfig | None = None,
    store: str | Path = "model_store",
    device: str = "auto",
    image_size: int | None = None,
    weights_key: str | None = None,
    preprocessing: PreprocessingConfig | None = None,
    classes: str | Path | Sequence[str] | None = None,
    augment: Augmentation | None = None,
    val_images: int | None = None,
    skip_unreadable: bool = False,
    seed: int = 0,
    processes: int = 1,
    tensorboard: str | Path | None = None,
    trust_checkpoint: bool = False,
) -> Variant:
    """The baseline: a model with its checkpoint, or trained here.

    Args:
        model: a torchvision classifier, ``timm:NAME``, ``path/to/file.py:factory`` or ``package.module:factory``; or an
            ``nn.Module``, which is copied with its weights.
        checkpoint: a file of weights.
        data: ``digits``, ``imagefolder:DIR`` or a torchvision data set; or what a program holds: a ``Dataset``, a
            ``DataLoader``, a pair of images and labels, or what `image_data` makes of them with what must be stated.
        weights: torchvision's own, such as ``DEFAULT``, instead of a checkpoint.
        training: how to train where there are no weights.
        store: where artifacts are kept.
        device: where to train and calibrate: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        image_size: side of the network's input in pixels.
        weights_key: which weights of the checkpoint to take: their place in the file, such as ``model`` or
            ``state_dict_ema``, or what their names begin with, such as ``teacher.``; averaged ones if there are any.
        preprocessing: what images go through, where that is to differ from what model and data ask for.
        classes: the names of the classes in their order, or a text file with one a line, instead of the data's own.
        augment: random changes of training images: ``none``, ``shift`` or ``shift+flip``; by default what suits the
            data; a folder of images is not mirrored.
        val_images: measure accuracy on so many validation images, drawn from each class alike; by default on all.
        skip_unreadable: measure without the validation images that cannot be read, instead of refusing them.
        seed: of every random choice.
        processes: how many processes of this machine train together, here and in ``qat``; on GPUs each has one.
        tensorboard: a folder for TensorBoard's events of what is trained, a folder in it for each artifact.
        trust_checkpoint: let the checkpoint's pickle run code.

    Raises:
        UserError: something is missing, unreadable, or does not fit.
    """
    must_be_model(model)
    with silenced():
        bar = here()
        try:
            job = Job(
                model=model,
                checkpoint=Path(checkpoint) if checkpoint is not None else None,
                data=data if isinstance(data, str | ImageData) else _held(data, seed, bar),
                classes=Path(classes) if isinstance(classes, str) else classes,
                val_images=val_images,
                augment=augment,
                skip_unreadable=skip_unreadable,
                store=Path(store),
                device=device,
                image_size=image_size,
                weights=weights,
                weights_key=weights_key,
                preprocessing=Wish(preprocessing, "your setting {}") if preprocessing is not None else None,
                trust_checkpoint=trust_checkpoint,
                seed=seed,
                processes=processes,
                tensorboard=Path(tensorboard) if tensorboard is not None else None,
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
        parent: what to run it on.
        config: a pass's settings, such as ``Ptq(observer="minmax")``.
        name: the variant's name; by default the pass's, with the settings that differ from its defaults.

    Raises:
        UserError: the pass cannot follow this parent.
        NotApplicableError: it has nothing to do for this model or machine.
        PassError: its result is not what it promises.
    """
    must_be(Variant, parent, "apply takes a variant, as load() gives it")
    must_be(Config, config, f"apply takes a pass's settings, such as opt.{nearest_settings(config)}()")
    wanted = name or step_name(config)
    with silenced(), _shown(parent.session, wanted):
        return Variant(parent.session, parent.session.apply(parent.artifact, config, wanted))


def compare(
    *variants: Variant,
    timing: Timing | None = None,
    measure: str = "auto",
    executions: Sequence[str | Execution] | None = None,
    max_drop: float = _RULE.max_drop,
    objective: Objective = _RULE.objective,
    confidence: float = _RULE.confidence,
) -> Comparison:
    """Measure variants of one session side by side: accuracy, parity, speed, memory and size.

    Each is measured by every execution (engine and device) that can run it, in a process of its own.

    Differences are to the first variant, which should be the float baseline; speed is measured in
    interleaved rounds, together with references of the first, or of the nearest float module that it was made
    from: eager ones, and its float graph on ONNX Runtime and OpenVINO where no variant is one.

    Args:
        variants: what to compare.
        timing: how speed is measured.
        measure: where to measure: ``auto`` (every device that there is), or a list such as ``cpu,cuda``.
        executions: engines' names, such as ``openvino``, or executions; by default all. The first variant is measured
            in any case.
        max_drop: loss of top-1, as a fraction, that an artifact's interval must exclude to be recommended.
        objective: what the recommended artifact is best at: ``latency`` (median, one image), ``p95``,
            ``throughput`` (at the best batch size) or ``size``.
        confidence: of that interval.

    Raises:
        UserError: there are none, two share a name, they come from different sessions, the rule is none, or there is
            no such engine or device.
    """
    rule = Recommend(objective=objective, max_drop=max_drop, confidence=confidence)
    if not variants:
        raise UserError("compare needs at least one variant")
    for variant in variants:
        must_be(Variant, variant, "compare takes variants, as load() and apply() give them")
    session = variants[0].session
    names = [variant.name for variant in variants]
    for variant in variants:
        if differing := differences(session, variant.session):
            raise UserError(f"{variant.name} cannot be compared with {names[0]}: they differ in {', '.join(differing)}")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"two variants are called {twice[0]!r}; give one another name: apply(…, name=…)")
    timing = timing or Timing()
    if executions is not None:
        timing = Timing(**{**dict(timing), "executions": tuple(executions)})
    check_wanted(timing.executions or ())
    devices = measured_devices(measure, session.context.device)
    with silenced():
        bench = Bench(session.store, session.context, timing, devices)
        measured = measure_steps([variant.step for variant in variants], bench, functools.partial(graph_of, session))
    return Comparison(
        Results(
            title=session.source.name,
            rows=measured.rows,
            references=measured.references,
            references_of=measured.references_of,
            yardstick=measured.turns.yardstick,
            eager=measured.turns.eager,
            recommendation=recommend(
                measured.rows,
                measured.turns.speeds,
                rule,
                measured.right,
                classes=len(session.context.data.classes),
            ),
            measurement=measured.measurement,
        )
    )


def compare_runs(
    *names: str,
    store: str | Path = "model_store",
    measure: str = "auto",
    timing: Timing | None = None,
    max_drop: float = _RULE.max_drop,
    objective: Objective = _RULE.objective,
    confidence: float = _RULE.confidence,
) -> Comparison:
    """Compare artifacts of several runs that were judged by the same images: speed and memory are measured anew.

    Args:
        names: ``RUN`` stands for its baseline and its recommended artifact, ``RUN/ARTIFACT`` for that one. The
            first is what the others are compared with.
        store: where the runs are.
        measure: where to measure: ``auto`` (every device that there is), or a list such as ``cpu,cuda``.
        timing: how speed is measured.
        max_drop: as of `compare`.
        objective: as of `compare`.
        confidence: as of `compare`.

    Raises:
        UserError: a run or artifact does not exist, or they were judged by different images; what differs is named.
    """
    rule = Recommend(objective=objective, max_drop=max_drop, confidence=confidence)
    with silenced():
        results = _compare_runs(
            Path(store),
            names,
            timing=timing or Timing(),
            rule=rule,
            devices=measured_devices(measure, resolve_device("auto")),
            listener=here(),
        )
    return Comparison(results)


def sensitivity(
    variant: Variant,
    *,
    ptq: Ptq | None = None,
    timing: Timing | None = None,
    measure: str = "auto",
    execution: str | None = None,
) -> Sensitivity:
    """Measure what each layer costs and wins in int8: alone quantized, and as the only one that is not.

    Two artifacts are made and measured for each layer; all are kept in the store, and a call that was interrupted goes
    on from there.

    Args:
        variant: a float module, or what ``Ptq`` made of one, whose settings are then taken.
        ptq: how layers are quantized, where that is to differ.
        timing: how speed is measured; by default one image at a time.
        measure: where to measure: ``auto`` (every device that there is), or a list such as ``cpu,cuda``.
        execution: the engine that runs all of them; by default the one that is fastest with every layer in int8.

    Raises:
        UserError: the variant is no such, or there is no such engine.
    """
    must_be(Variant, variant, "sensitivity takes a variant, as load() and apply() give it")
    session = variant.session
    with silenced():
        parent, config = subject(variant.artifact, ptq)
        found, _ = _sensitivity(
            session,
            parent,
            config,
            timing=timing or ONE_IMAGE,
            devices=measured_devices(measure, session.context.device),
            execution=execution,
        )
    return found


def search(
    variant: Variant,
    *,
    max_drop: float = Search().max_drop,
    max_latency_ms: float | None = None,
    bits: Sequence[int] = (8, 32),
    method: MethodName = "greedy",
    max_trials: int | None = None,
    execution: str | None = None,
    ptq: Ptq | None = None,
    timing: Timing | None = None,
    measure: str = "auto",
) -> Searched:
    """Choose the precision of each layer under a budget, by measured accuracy and measured latency.

    Half of the evaluation images choose, and the others judge what was chosen. An int8 pair that is slower than the
    fastest float execution is never returned. All trials are kept in the store, and a call that was interrupted goes on
    from there.

    Args:
        variant: the float baseline, as ``load`` gives it.
        max_drop: largest loss of top-1, as a fraction.
        max_latency_ms: longest median latency of one image.
        bits: precisions that layers may have: 8 (int8), 16 (FP16 weights, and arithmetic where an execution has it),
            32; 8 and at least one of the others.
        method: ``greedy`` (by the layers' sensitivity in simulation) or ``halving`` (delta debugging).
        max_trials: most trials, of which the best is taken; by default as many as the method needs.
        execution: the engine that trials run by; by default the one that is fastest with every layer in int8.
        ptq: how layers are quantized.
        timing: how speed is measured; by default one image at a time.
        measure: where to measure: ``auto`` (every device that there is), or a list such as ``cpu,cuda``.

    Raises:
        UserError: the variant is no float module, or a setting is not legal.
    """
    must_be(Variant, variant, "search takes a variant, as load() gives it")
    if variant.artifact.kind != "module":
        raise UserError(f"search starts from a float module, and {variant.name} is none; give it what load() gave")
    session = variant.session
    by = Search(
        max_drop=max_drop,
        max_latency_ms=max_latency_ms,
        bits=tuple(bits),
        method=method,
        max_trials=max_trials,
        execution=execution,
    )
    with silenced():
        found, _ = _search(
            session,
            variant.step,
            by,
            ptq=ptq,
            timing=timing or ONE_IMAGE,
            devices=measured_devices(measure, session.context.device),
        )
        wanted = found.pair.partition("@")[0] if found.pair else None
        steps = {variant.name: variant.step}
        for stage in found.stages:
            config = find_pass(stage["pass"]).config(**stage["config"])
            steps[stage["name"]] = session.apply(steps[stage["from"]].artifact, config, stage["name"])
    return Searched(found, Variant(session, steps[wanted]) if wanted else None)


def profile(variant: Variant, *, batch: int = 1, execution: str | Execution | None = None) -> Profiled:
    """What each layer of a variant takes: time, MACs, bytes, and the share of this machine's peak, as engines tell it.

    Each execution has a process of its own; peaks are measured there, too.

    Args:
        variant: any.
        batch: images that are run together.
        execution: an engine's name, such as ``openvino``, or an execution; by default all on the CPU that run it. What
            does not tell is named, with the reason.

    Raises:
        UserError: the batch is no number of images, there is no such engine, or none that tells.
    """
    must_be(Variant, variant, "profile takes a variant, as load() and apply() give it")
    with silenced():
        return profile_artifact(
            variant.artifact.folder,
            batch=batch,
            execution=execution,
            floats=float_program((one.folder, one.card) for one in variant.artifact.line()),
            listener=here(),
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


def restore(base: Variant, folder: str | Path) -> Variant:
    """Take back what `save` wrote, to measure it, pack it, or go on from it.

    Args:
        base: a variant of the same model and data, as `load` gives it.
        folder: what was saved; checked against its card.

    Raises:
        UserError: it is no whole artifact, or one of another model, other classes or other preprocessing.
    """
    must_be(Variant, base, "restore takes a variant, as load() gives it, of the model and data that it is for")
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
        UserError: the name is not a legal one, or ``path`` cannot be written.
    """
    target = Path(path)
    return build_archive(variant.artifact.folder, target, model_name=model_name or target.stem, options=options)


def _held(data: Data, seed: int, bar: ProgressBar) -> ImageData:
    """What a program holds, as a data set; how much of it is read is shown."""
    bar.started("reading")
    return image_data(data, seed=seed, told=lambda share: bar.progressed(share, "images"))


@contextlib.contextmanager
def _shown(session: Session, name: str) -> Iterator[None]:
    """Show how far a step is, and end that however the step ends."""
    listener = session.context.listener
    listener.started(name)
    try:
        yield
    finally:
        listener.ended(name, 0.0, cached=False, skipped=None)
