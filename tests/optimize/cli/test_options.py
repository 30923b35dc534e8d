"""The options of ``optimize run`` are the fields of its job: in its help, for make and in the reference."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from optimize import cli
from optimize.run.job import Job
from serve.common.command_options import options_table, with_options
from serve.common.config import Config, Option
from serve.runtime.errors import UserError

ROOT = Path(__file__).parents[3]
#: A value of each option of `run` that takes one, and what becomes of it in the job; written down by hand.
GIVEN: dict[str, tuple[str, object]] = {
    "--checkpoint": ("w.pt", Path("w.pt")),
    "--data": ("imagefolder:photos", "imagefolder:photos"),
    "--classes": ("names.txt", Path("names.txt")),
    "--class-order": ("sorted", "sorted"),
    "--val-images": ("7", 7),
    "--augment": ("shift+flip", "shift+flip"),
    "--recipe": ("r.yaml", Path("r.yaml")),
    "--store": ("there", Path("there")),
    "--device": ("cpu", "cpu"),
    "--measure": ("cpu,cuda", "cpu,cuda"),
    "--image-size": ("64", 64),
    "--weights-key": ("ema", "ema"),
    "--outputs": ("logits,map", "logits,map"),
    "--resize": ("40x32", (40, 32)),
    "--crop": ("32", (32, 32)),
    "--mean": ("0.5, 0.25,0.125", (0.5, 0.25, 0.125)),
    "--std": ("0.5", (0.5,)),
    "--interpolation": ("nearest", "nearest"),
    "--pixel-max": ("4095", 4095.0),
    "--name": ("mine", "mine"),
    "--seed": ("3", 3),
    "--processes": ("2", 2),
    "--tensorboard": ("logs", Path("logs")),
    "--objective": ("size", "size"),
    "--max-drop": ("0.5pp", 0.005),
    "--confidence": ("0.9", 0.9),
}
FLAGS = ["--skip-unreadable", "--accept-gaps", "--replace", "--remeasure", "--trust-checkpoint"]
#: Options that have another name in the job than on the command line, or lie deeper in it.
RENAMED = {"--name": "run"}
NOT_OF_THE_JOB = {"--all", "--json"}


def app_of(kind: type[Config]) -> tuple[typer.Typer, list[Any]]:
    """A command line whose only command has the options of ``kind``, and the settings that it was called with."""
    app, seen = typer.Typer(rich_markup_mode=None), []

    @app.command()
    @with_options(kind, "settings")
    def command(settings: Any) -> None:
        seen.append(settings)

    return app, seen


def invoke(kind: type[Config], *words: str) -> Any:
    app, seen = app_of(kind)
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return seen[0]


def value_of(job: Job, flag: str) -> object:
    name = RENAMED.get(flag, flag.removeprefix("--").replace("-", "_"))
    if hasattr(job, name):
        return getattr(job, name)
    if name in job.recommend:
        return job.recommend[name]
    assert job.preprocessing is not None
    return getattr(job.preprocessing.config, name)


def flags_of_run() -> set[str]:
    command = typer.main.get_command(cli.app).commands["run"]  # type: ignore[attr-defined]
    return {param.opts[0] for param in command.params if param.param_type_name == "option"}


class WithWarmUp(Job):
    """A job with a setting more, of which nothing else in the project knows."""

    warm_up: Annotated[tuple[int, ...], Option(metavar="N,N…", kind=str, read=lambda text: text.split(","))] = Field(
        default=(), description="Steps before the measurement begins. Ten are enough."
    )
    patience: int = Field(default=4, ge=1, description="Epochs to wait for an improvement.")
    loudly: bool = Field(default=False, description="Say more.")


def test_a_field_of_a_job_is_an_option_of_its_command_stands_in_the_help_and_in_the_reference() -> None:
    job = invoke(WithWarmUp, "resnet18", "--warm-up", "3,4", "--loudly")
    assert (job.warm_up, job.patience, job.loudly) == ((3, 4), 4, True)
    assert job.model_fields_set == {"model", "warm_up", "loudly"}
    help_text = " ".join(CliRunner().invoke(app_of(WithWarmUp)[0], ["--help"]).output.split())
    assert "--warm-up N,N… Steps before the measurement begins. --patience N" in help_text
    assert "--patience N Epochs to wait for an improvement. [default: 4; x>=1]" in help_text
    assert "--loudly Say more." in help_text
    rows = options_table(WithWarmUp).splitlines()
    assert "| `--warm-up N,N…` | `WARM_UP` | Steps before the measurement begins. Ten are enough. |  |" in rows
    assert "| `--patience N` | `PATIENCE` | Epochs to wait for an improvement. | `4` |" in rows
    assert "| `--loudly` | `LOUDLY` | Say more. | `False` |" in rows


def test_a_field_that_no_command_line_can_take_is_refused_when_the_command_is_made() -> None:
    class Unread(Config):
        shape: tuple[int, ...] = Field(default=(), description="Some numbers.")

    with pytest.raises(TypeError, match=r"shape is .*: say in an Option how it is read from a command line"):
        app_of(Unread)


@pytest.mark.parametrize("flag", GIVEN)
def test_each_option_of_run_reaches_the_job(flag: str) -> None:
    word, value = GIVEN[flag]
    more = () if flag != "--weights-key" else ("--checkpoint", "w.pt")
    assert value_of(invoke(Job, "resnet18", flag, word, *more), flag) == value


@pytest.mark.parametrize("flag", FLAGS)
def test_each_flag_of_run_reaches_the_job(flag: str) -> None:
    assert value_of(invoke(Job, "resnet18"), flag) is False
    assert value_of(invoke(Job, "resnet18", "--checkpoint", "w.pt", flag), flag) is True


def test_what_is_not_given_is_as_the_job_has_it() -> None:
    assert invoke(Job, "resnet18") == Job(model="resnet18")


def test_no_option_of_run_is_left_out_here() -> None:
    assert flags_of_run() - NOT_OF_THE_JOB == {*GIVEN, *FLAGS, "--weights"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--max-drop", "half"],
            "--max-drop must be a loss of accuracy such as 0.5pp (half a percentage point), not 'half'",
        ),
        (["--crop", "3x"], "--crop: must be whole pixels, one side or height and width"),
        (["--name", "a/b"], "run: the name of a run must have letters, digits"),
        (["--augment", "flip"], "augment: there is no augmentation 'flip'"),
        (["--weights", "DEFAULT", "--checkpoint", "w.pt"], "checkpoint and weights are both given"),
    ],
)
def test_an_illegal_value_is_one_line_and_exit_code_2(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app_of(Job)[0], ["resnet18", *words])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


def test_a_module_and_open_data_are_known_without_their_libraries_being_imported_for_a_help_text() -> None:
    from torch import nn

    layer = nn.Linear(2, 2)
    assert Job(model=layer).model is layer
    assert Job(model=layer).brings_weights
    for settings in ({"model": 3}, {"model": "resnet18", "data": layer}):
        with pytest.raises(UserError, match="input should be"):
            Job(**settings)


def test_the_reference_has_a_row_for_each_option_of_run() -> None:
    rows = options_table(Job).splitlines()[2:]
    named = [re.match(r"\| `([^` ]+)", row) for row in rows]
    assert {found[1] for found in named if found} == {"MODEL", *(flags_of_run() - NOT_OF_THE_JOB)}
    assert all(row.count(" | ") == 3 for row in (row.replace(r"\|", "") for row in rows))
    assert r"| `--augment none\|shift\|shift+flip` | `AUGMENT` |" in "\n".join(rows)
    assert "| `--name NAME` | `RUN` |" in "\n".join(rows)


def made(*words: str) -> str:
    """The command that make would run."""
    run = ["make", "--no-print-directory", "-n", "-o", ".venv/.installed", *words]
    return " ".join(
        subprocess.run(run, capture_output=True, text=True, cwd=ROOT, check=True, timeout=60).stdout.split()
    )


def test_each_option_of_run_works_from_make_and_make_hands_on_no_other() -> None:
    variables = dict(re.findall(r"^\| `(--[^` ]+)[^|]*(?:\\\|[^|]*)*\| `(\w+)`", options_table(Job), re.MULTILINE))
    assert {*variables} == {*GIVEN, *FLAGS, "--weights"}
    words = made("optimize", *(f"{name}=1" for name in variables.values()))
    for flag in variables:
        assert f" {flag}" + ("" if flag in FLAGS else " '1'") + " " in f"{words} "
    assert set(re.findall(r" (--[a-z-]+)", words)) == {*variables}
    own = set(re.findall(r" (--[a-z-]+)", made("optimize")))
    assert own == {"--store", "--device", "--measure"}
    assert " --remeasure" in made("bench")


@pytest.mark.parametrize(
    "target", ["optimize", "bench", "package", "serve", "add", "replace", "remove", "stop", "status"]
)
def test_make_hands_on_what_stands_in_args_as_it_is(target: str) -> None:
    said = made(target, "MODEL=net", "ARGS=--seed 3 --name 'a b'")
    assert re.search(r"python -m (optimize|serve) [^;]* --seed 3 --name 'a b'($|;)", said)
