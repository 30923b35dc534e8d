"""Which of a file's weights are taken, what is bridged on the way into a module, and what a misfit is told."""

from __future__ import annotations

import argparse
import pathlib
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from optimize.models.checkpoint import Checkpoint, read_checkpoint
from optimize.models.model_names import resolve_model
from optimize.models.weight_matching import load_into
from optimize.run.job import Job
from optimize.run.opened_job import open_job
from serve.runtime.errors import UserError
from tests.optimize.models.test_checkpoint import Net, assert_same, weights
from tests.optimize.runs_fixtures import TINY, Heard


def prefixed(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + key: value for key, value in state.items()}


def lightning(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """As `Trainer.save_checkpoint` of pytorch-lightning 2 writes it."""
    return {
        "epoch": 9,
        "global_step": 410,
        "pytorch-lightning_version": "2.5.1",
        "state_dict": OrderedDict(state),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 10, "completed": 9}}}},
        "callbacks": {"ModelCheckpoint{'monitor': 'val_loss'}": {"best_model_score": torch.tensor(0.3), "kth": {}}},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 1e-3}]}],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 1e-3, "args": argparse.Namespace(data=pathlib.PosixPath("/data"))},
    }


def saved(content: Any, folder: pathlib.Path, name: str = "net.ckpt") -> pathlib.Path:
    torch.save(content, folder / name)
    return folder / name


@pytest.mark.parametrize("prefix", ["model.", "net.", "backbone.encoder.", "model.module."])
def test_a_lightning_checkpoint_loads_without_trust_and_its_prefix_is_said(tmp_path, prefix):
    path = saved(lightning(prefixed(weights(3), prefix)), tmp_path)
    checkpoint, net = read_checkpoint(path), Net()
    assert load_into(net, checkpoint, path) == (f"the prefix {prefix!r} of its names is removed",)
    assert_same(net.state_dict(), weights(3))
    assert checkpoint.info["epoch"] == 9


def test_weights_of_the_bare_network_fit_a_module_that_wraps_it():
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

    wrapped = Wrapped()
    notes = load_into(wrapped, Checkpoint(weights(2), "0" * 64), pathlib.Path("net.pt"))
    assert notes == ("the prefix 'net.' is added to its names",)
    assert_same(wrapped.net.state_dict(), weights(2))


def test_names_that_fit_need_no_words():
    assert load_into(Net(), Checkpoint(weights(), "0" * 64), pathlib.Path("net.pt")) == ()


def test_a_loss_s_weights_beside_the_network_are_left_out_and_this_is_said(tmp_path):
    content = lightning(
        prefixed(weights(1), "model.") | {"criterion.weight": torch.ones(3), "auc.preds": torch.ones(4)}
    )
    path = saved(content, tmp_path)
    net = Net()
    (note,) = load_into(net, read_checkpoint(path), path)
    assert note == "those of its names are used that begin with 'model.', and not criterion.weight, auc.preds"
    assert_same(net.state_dict(), weights(1))
    checkpoint, net = read_checkpoint(path, weights_key="model."), Net()
    load_into(net, checkpoint, path)
    assert checkpoint.place == "state_dict:model."
    assert_same(net.state_dict(), weights(1))


def test_a_misfit_names_the_prefix_that_has_most_of_what_is_needed(tmp_path):
    state = prefixed(weights(1), "model.") | {"criterion.weight": torch.ones(3)}
    del state["model.conv.bias"]
    path = saved(lightning(state), tmp_path)
    with pytest.raises(
        UserError, match=r"what begins with 'model\.' has 7 of the 8 names .*: --weights-key model\."
    ) as caught:
        load_into(Net(), read_checkpoint(path), path)
    assert "\n" not in str(caught.value)


def test_of_two_networks_in_one_file_both_are_named_and_neither_is_guessed(tmp_path):
    path = saved({"state_dict": prefixed(weights(1), "student.") | prefixed(weights(2), "teacher.")}, tmp_path)
    with pytest.raises(UserError, match=r"--weights-key student\.; what begins with 'teacher\.' would fit"):
        load_into(Net(), read_checkpoint(path), path)
    assert_same(read_checkpoint(path, weights_key="teacher.").state, weights(2))


def test_a_prefixed_checkpoint_of_another_head_is_told_of_the_head():
    state = prefixed(weights(classes=7), "model.")
    with pytest.raises(UserError, match=r"prefix 'model\.' of its names is removed\): the checkpoint's head has 7"):
        load_into(Net(3), Checkpoint(state, "0" * 64), pathlib.Path("net.pt"))


def test_all_reasons_are_told_at_once_in_one_line():
    state = dict(weights(classes=7))
    state["conv.weight"][0, 0, 0, 0] = float("nan")
    state["bn.running_var"][0] = float("inf")
    del state["conv.bias"]
    with pytest.raises(UserError) as caught:
        load_into(Net(3), Checkpoint(state, "0" * 64), pathlib.Path("net.pt"))
    message = str(caught.value)
    for part in ("1 missing: conv.bias", "head has 7 outputs", "2 tensors hold NaN or infinite weights: conv.w"):
        assert part in message
    assert "\n" not in message


def test_all_unusable_tensors_are_told_at_once(tmp_path):
    state = dict(weights())
    state["conv.weight"] = state["conv.weight"].to_sparse()
    state["head.weight"] = state["head.weight"].to_sparse()
    path = saved(state, tmp_path)
    with pytest.raises(UserError, match=r"conv\.weight is torch\.sparse_coo, head\.weight is torch\.sparse_coo"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "averaged", "other"),
    [
        (lambda e, m: {"model": m, "ema": e}, "ema", "model"),
        (lambda e, m: {"model": m, "model_ema": e, "args": argparse.Namespace(lr=1)}, "model_ema", "model"),
        (lambda e, m: {"state_dict": m, "state_dict_ema": e, "epoch": 1}, "state_dict_ema", "state_dict"),
        (lambda e, m: {"model": m, "ema": {"module": e, "decay": 0.9}}, "ema.module", "model"),
        (
            lambda e, m: {"model": m, "ema": prefixed(e, "module.") | {"n_averaged": torch.tensor(5)}},
            "ema",
            "model",
        ),
    ],
)
def test_averaged_weights_go_first_which_is_said_and_can_be_chosen(tmp_path, content, averaged, other):
    path = saved(content(weights(1), weights(2)), tmp_path)
    chosen = read_checkpoint(path)
    assert_same(chosen.state, weights(1))
    assert chosen.place == averaged
    assert chosen.notes == (
        f"the averaged weights (EMA) of {averaged!r} are used; --weights-key {other} selects the others",
    )
    asked = read_checkpoint(path, weights_key=other)
    assert_same(asked.state, weights(2))
    assert asked.notes == (f"the weights of {other!r} are used, as requested",)
    assert_same(read_checkpoint(path, weights_key=averaged).state, weights(1))


def test_averages_of_parameters_alone_are_not_taken_and_this_is_said(tmp_path):
    parameters = {key: value for key, value in weights(1).items() if "running" not in key and "num_b" not in key}
    path = saved({"model": weights(2), "ema": {"shadow": parameters}}, tmp_path)
    chosen = read_checkpoint(path)
    assert_same(chosen.state, weights(2))
    assert chosen.notes == (
        "the averaged weights (EMA) of 'ema.shadow' lack bn.running_mean, bn.running_var and 1 more, "
        "those of 'model' are used",
    )


def test_a_place_that_is_not_there_names_those_that_are(tmp_path):
    path = saved({"model": weights(), "model_ema": weights()}, tmp_path)
    with pytest.raises(UserError, match=r"under 'model_emma' \(did you mean model_ema.*it has model_ema, model, bn\."):
        read_checkpoint(path, weights_key="model_emma")
    with pytest.raises(UserError, match="no weights under 'x'"):
        read_checkpoint(saved(weights(), tmp_path, "bare.pt"), weights_key="x")


def tiny_state(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return resolve_model(TINY).build(10).state_dict()


def test_the_choice_is_in_the_run_s_lines_the_card_and_the_key(tmp_path):
    path = saved({"model": prefixed(tiny_state(1), "net."), "ema": prefixed(tiny_state(2), "net.")}, tmp_path)
    heard = Heard()

    def baseline(weights_key: str | None) -> Any:
        job = Job(model=TINY, checkpoint=path, store=tmp_path / "store", device="cpu", weights_key=weights_key)
        opened = open_job(job, heard)
        return opened.session.baseline(checkpoint=opened.checkpoint, origin=opened.origin).artifact

    averaged, plain = baseline(None), baseline("model")
    assert averaged.key != plain.key
    assert_same(averaged.module().state_dict(), tiny_state(2))
    assert_same(plain.module().state_dict(), tiny_state(1))
    for said in ("the averaged weights (EMA) of 'ema' are used", "the prefix 'net.' of its names is removed"):
        assert any(said in line for line in heard.lines)
        assert any(said in note for note in averaged.card.notes)
    assert any("was probably trained on the images that a training pass" in note for note in plain.card.notes)


def test_a_key_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="--weights-key ema needs a checkpoint, and none is given"):
        open_job(Job(model=TINY, store=tmp_path / "store", weights_key="ema"), Heard())
