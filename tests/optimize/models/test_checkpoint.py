"""Real files of every kind that people save, read back and compared with the tensors that went in."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from optimize.models.checkpoint import Checkpoint, read_checkpoint
from optimize.models.model_names import resolve_model, with_named_weights
from optimize.models.weight_matching import load_into
from serve.runtime.errors import UserError
from tests.narrow import layer

PREFIXES = st.lists(st.sampled_from(["module.", "_orig_mod."]), max_size=4).map("".join)


class Net(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.bn(self.conv(x))).mean((2, 3)))


class Py2Pickler(pickle._Pickler):
    """Writes text as Python 2 did: SHORT_BINSTRING, one byte a character."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)
    write: Callable[[bytes], object]
    memoize: Callable[[object], None]

    def save_str(self, text: str) -> None:
        data = text.encode("latin-1")
        self.write(b"U" + bytes([len(data)]) + data)
        self.memoize(text)

    dispatch[str] = save_str


class Payload:
    """Unpickling it makes a folder, which a test can see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return (os.mkdir, (str(self.folder),))


def weights(seed: int = 0, classes: int = 3) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    net = Net(classes)
    net(torch.randn(8, 3, 9, 9))  # gives BatchNorm statistics that are not the defaults
    return net.state_dict()


def assert_same(actual: Any, expected: Any) -> None:
    assert set(actual) == set(expected)
    for key, value in expected.items():
        assert torch.equal(actual[key], value.float() if value.is_floating_point() else value), key


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".th", ".tar"])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_plain_state_dict_is_read_from_every_suffix_and_both_of_torchs_formats(tmp_path, suffix, zipped):
    path = tmp_path / f"net{suffix}"
    torch.save(weights(), path, _use_new_zipfile_serialization=zipped)
    checkpoint = read_checkpoint(path)
    assert_same(checkpoint.state, weights())
    assert checkpoint.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {"state_dict": s},
        lambda s: {"model": s},
        lambda s: {"model_state_dict": s},
        lambda s: {"ema": s},
        lambda s: {"ema": {"module": s, "decay": 0.9}},
        lambda s: {"optimizer": {"state": {}, "lr": 0.1}, "model": {"state_dict": s}},
    ],
)
def test_the_state_dict_is_found_where_training_scripts_put_it(tmp_path, wrap):
    torch.save(wrap(weights()), tmp_path / "net.pt")
    assert_same(read_checkpoint(tmp_path / "net.pt").state, weights())


def test_plain_numbers_beside_the_state_dict_are_kept_and_nothing_else(tmp_path):
    content = {"state_dict": weights(), "epoch": 7, "best_prec1": 91.5, "arch": "net", "resumed": True}
    torch.save(content, tmp_path / "net.pt")
    assert read_checkpoint(tmp_path / "net.pt").info == {"epoch": 7, "best_prec1": 91.5}


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(prefix=PREFIXES)
def test_any_stack_of_wrappers_prefixes_on_all_keys_is_taken_off(tmp_path, prefix):
    torch.save({prefix + key: value for key, value in weights().items()}, tmp_path / "net.pt")
    checkpoint = read_checkpoint(tmp_path / "net.pt")
    assert_same(checkpoint.state, weights())
    load_into(Net(), checkpoint, tmp_path / "net.pt")


def test_module_prefix_on_some_keys_only_is_part_of_their_names(tmp_path):
    state = {"module.weight": torch.ones(2), "other": torch.ones(1)}
    torch.save(state, tmp_path / "net.pt")
    assert set(read_checkpoint(tmp_path / "net.pt").state) == set(state)


def test_a_compiled_child_and_an_averaged_model_leave_no_trace(tmp_path):
    state = {key.replace("bn.", "bn._orig_mod."): value for key, value in weights().items()}
    averaged = {"n_averaged": torch.tensor(3)} | {f"module.{key}": value for key, value in state.items()}
    torch.save(averaged, tmp_path / "net.pt")
    assert_same(read_checkpoint(tmp_path / "net.pt").state, weights())


def test_a_model_whose_only_child_is_called_module_takes_its_own_checkpoint_back(tmp_path):
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Net()

    saved, other = Outer(), Outer()
    torch.save(saved.state_dict(), tmp_path / "net.pt")
    load_into(other, read_checkpoint(tmp_path / "net.pt"), tmp_path / "net.pt")
    assert_same(other.state_dict(), saved.state_dict())


def test_safetensors_is_read(tmp_path):
    save_file(dict(weights()), tmp_path / "net.safetensors")
    assert_same(read_checkpoint(tmp_path / "net.safetensors").state, weights())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floating_types_become_float32_and_integers_stay(tmp_path, dtype):
    state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in weights().items()}
    torch.save(state, tmp_path / "net.pt")
    loaded = read_checkpoint(tmp_path / "net.pt").state
    assert_same(loaded, state)
    assert loaded["conv.weight"].dtype == torch.float32
    assert loaded["bn.num_batches_tracked"].dtype == torch.int64


def test_a_python_2_pickle_with_latin_1_text_is_read(tmp_path):
    content = {"state_dict": weights(), "author": "Ren\xe9", "epoch": 3}
    module = SimpleNamespace(
        Pickler=Py2Pickler, dump=lambda obj, file, protocol: Py2Pickler(file, protocol).dump(obj), __name__="py2"
    )
    torch.save(content, tmp_path / "net.th", pickle_module=module, _use_new_zipfile_serialization=False)
    assert b"U\x04Ren\xe9" in (tmp_path / "net.th").read_bytes()
    checkpoint = read_checkpoint(tmp_path / "net.th")
    assert_same(checkpoint.state, weights())
    assert checkpoint.info == {"epoch": 3}


@pytest.mark.parametrize("zipped", [True, False])
def test_a_malicious_pickle_does_not_run_and_the_message_names_object_and_flag(tmp_path, zipped):
    folder = tmp_path / "pwned"
    content = {"state_dict": weights(), "x": Payload(folder)}
    torch.save(content, tmp_path / "net.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match=r"posix\.mkdir.*--trust-checkpoint"):
        read_checkpoint(tmp_path / "net.pt")
    assert not folder.exists()


def test_a_plain_malicious_pickle_file_does_not_run_either(tmp_path):
    (tmp_path / "net.pt").write_bytes(pickle.dumps(Payload(tmp_path / "pwned"), protocol=2))
    with pytest.raises(UserError, match=r"posix\.mkdir"):
        read_checkpoint(tmp_path / "net.pt")
    assert not (tmp_path / "pwned").exists()


def test_a_pickled_module_needs_trust_and_then_gives_its_state(tmp_path):
    net = Net()
    torch.save({"model": net}, tmp_path / "net.pt")
    with pytest.raises(UserError, match=r"Net.*--trust-checkpoint"):
        read_checkpoint(tmp_path / "net.pt")
    assert_same(read_checkpoint(tmp_path / "net.pt", trust_pickle=True).state, net.state_dict())
    torch.save(net, tmp_path / "bare.pt")
    assert_same(read_checkpoint(tmp_path / "bare.pt", trust_pickle=True).state, net.state_dict())


def test_a_torchscript_archive_is_refused_as_such_even_with_trust(tmp_path):
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), str(tmp_path / "net.pt"))
    for trust in (False, True):
        with pytest.raises(UserError, match="TorchScript"):
            read_checkpoint(tmp_path / "net.pt", trust_pickle=trust)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_truncated_file_of_many_pages_says_so_too(tmp_path, zipped, share):
    whole = weights() | {"more": torch.randn(40_000)}  # torch looks for a zip file's end in its last 64 kB
    torch.save(whole, tmp_path / "whole.pt", _use_new_zipfile_serialization=zipped)
    data = (tmp_path / "whole.pt").read_bytes()
    (tmp_path / "net.pt").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(UserError, match="truncated"):
        read_checkpoint(tmp_path / "net.pt")


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_truncated_file_says_so_in_one_line(tmp_path, zipped, share):
    torch.save(weights(), tmp_path / "whole.pt", _use_new_zipfile_serialization=zipped)
    data = (tmp_path / "whole.pt").read_bytes()
    (tmp_path / "net.pt").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(UserError, match="truncated") as caught:
        read_checkpoint(tmp_path / "net.pt")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 46830571\n", "git lfs pull"),
        ("\n<!DOCTYPE html>\n<html><title>Sign in</title></html>", "is a web page"),
    ],
)
def test_what_was_fetched_in_the_place_of_the_weights_is_told(tmp_path, content, reason, suffix):
    (tmp_path / f"net{suffix}").write_text(content)
    with pytest.raises(UserError, match=reason):
        read_checkpoint(tmp_path / f"net{suffix}")


def test_a_zip_file_of_others_and_safetensors_by_another_name_are_told(tmp_path):
    with zipfile.ZipFile(tmp_path / "net.pt", "w") as archive:
        archive.writestr("release/net.pth", b"weights")
    with pytest.raises(UserError, match="is a zip archive, but not one that torch"):
        read_checkpoint(tmp_path / "net.pt")
    save_file(dict(weights()), tmp_path / "named.pth")
    with pytest.raises(UserError, match=r"named.pth: looks like a safetensors file; .*end in \.safetensors"):
        read_checkpoint(tmp_path / "named.pth")


def test_complex_numbers_are_refused_as_what_they_are(tmp_path):
    torch.save(weights() | {"head.bias": torch.zeros(3, dtype=torch.complex64)}, tmp_path / "net.pt")
    with pytest.raises(UserError, match=r"needs dense tensors of real numbers: head\.bias is complex$"):
        read_checkpoint(tmp_path / "net.pt")


def test_integers_without_their_scale_are_no_weights():
    state = dict(Net().state_dict())
    state["conv.weight"] = (127 * state["conv.weight"]).to(torch.int8)
    with pytest.raises(UserError, match=r"1 are integers where .* floating-point weights: conv\.weight \(int8\)$"):
        load_into(Net(), checkpoint_of(state), Path("net.pt"))


def test_numbers_that_torch_does_not_convert_are_named(tmp_path):
    header = {
        "conv.weight": {"dtype": "F4", "shape": [4, 8], "data_offsets": [0, 16]},
        "bias": {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "net.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(24))
    with pytest.raises(UserError, match=r"conv\.weight is of float4_e2m1fn_x2, which torch does not convert$"):
        read_checkpoint(tmp_path / "net.safetensors")


def test_a_truncated_safetensors_file_says_so(tmp_path):
    save_file(dict(weights()), tmp_path / "whole.safetensors")
    (tmp_path / "net.safetensors").write_bytes((tmp_path / "whole.safetensors").read_bytes()[:-9])
    with pytest.raises(UserError, match="safetensors"):
        read_checkpoint(tmp_path / "net.safetensors")


def test_missing_file_folder_and_empty_file_are_told_apart(tmp_path):
    (tmp_path / "empty.pt").touch()
    for path, reason in ((tmp_path / "no.pt", "no such"), (tmp_path, "folder"), (tmp_path / "empty.pt", "empty")):
        with pytest.raises(UserError, match=reason):
            read_checkpoint(path)


@pytest.mark.parametrize("content", [{}, {"epoch": 1}, torch.ones(3), [1, 2], {"state_dict": {}}])
def test_a_file_without_a_state_dict_says_what_it_holds(tmp_path, content):
    torch.save(content, tmp_path / "net.pt")
    with pytest.raises(UserError, match="no state dict"):
        read_checkpoint(tmp_path / "net.pt")


LEGACY_HEAD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
ZIP = io.BytesIO()
torch.save({"a": torch.arange(30.0)}, ZIP)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    data=st.one_of(
        st.binary(max_size=300),
        st.binary(max_size=60).map(lambda tail: LEGACY_HEAD + tail),
        st.binary(max_size=60).map(lambda tail: b"PK\x03\x04" + tail),
    ),
    suffix=st.sampled_from([".pt", ".safetensors"]),
)
def test_random_bytes_are_a_user_error_and_never_anything_else(tmp_path, data, suffix):
    path = tmp_path / f"net{suffix}"
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        read_checkpoint(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(position=st.integers(0, len(ZIP.getvalue()) - 1), value=st.integers(0, 255))
def test_one_changed_byte_is_read_or_is_a_user_error(tmp_path, position, value):
    data = bytearray(ZIP.getvalue())
    data[position] = value
    (tmp_path / "net.pt").write_bytes(data)
    # Only the family's own error may come out; torch's and zipfile's would fail the test.
    refused: UserError | None = None
    try:
        state = read_checkpoint(tmp_path / "net.pt").state
    except UserError as error:
        refused = error
    if refused is None:
        assert all(isinstance(tensor, torch.Tensor) for tensor in state.values())
    else:
        assert len(str(refused).splitlines()) == 1


def checkpoint_of(state: dict[str, torch.Tensor]) -> Checkpoint:
    return Checkpoint(state, "0" * 64)


def test_loading_copies_every_value():
    net = Net()
    load_into(net, checkpoint_of(weights(5)), Path("net.pt"))
    assert_same(net.state_dict(), weights(5))


def test_missing_unexpected_and_misshaped_keys_are_listed_with_counts_and_shapes():
    state = dict(weights())
    del state["conv.bias"]
    state["extra.weight"] = torch.ones(1)
    state["head.weight"] = torch.ones(3, 5)
    with pytest.raises(UserError) as caught:
        load_into(Net(), checkpoint_of(state), Path("net.pt"))
    message = str(caught.value)
    assert "1 missing: conv.bias" in message
    assert "1 unexpected: extra.weight" in message
    assert "head.weight (file (3, 5), model (3, 4))" in message


def test_a_long_list_of_keys_is_cut_with_its_count():
    with pytest.raises(UserError, match=r"20 unexpected: (x\d+, ){7}x\d+ and 12 more"):
        load_into(Net(), checkpoint_of(dict(weights()) | {f"x{i}": torch.ones(1) for i in range(20)}), Path("n.pt"))


def test_a_head_of_another_size_is_explained_and_not_listed_as_shapes():
    with pytest.raises(UserError, match=r"head has 7 outputs, the data has 3 classes \(head\)"):
        load_into(Net(3), checkpoint_of(weights(classes=7)), Path("net.pt"))


def test_old_checkpoints_without_num_batches_tracked_load():
    state = {key: value for key, value in weights().items() if "num_batches" not in key}
    net = Net()
    load_into(net, checkpoint_of(state), Path("net.pt"))
    assert torch.equal(net.state_dict()["bn.running_mean"], state["bn.running_mean"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name_and_the_model_is_untouched(value):
    state = weights(1)
    state["bn.running_var"][2] = value
    net = Net()
    before = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    with pytest.raises(UserError, match=r"1 tensors hold NaN.*bn\.running_var"):
        load_into(net, checkpoint_of(state), Path("net.pt"))
    assert_same(net.state_dict(), before)


def test_inceptions_auxiliary_head_is_left_out_and_the_rest_loads(tmp_path):
    from torchvision.models import inception_v3

    saved = inception_v3(weights=None, aux_logits=True, init_weights=False, num_classes=4)
    torch.save(saved.state_dict(), tmp_path / "net.pt")
    model = resolve_model("inception_v3").build(4)
    load_into(model, read_checkpoint(tmp_path / "net.pt"), tmp_path / "net.pt")
    assert torch.equal(layer(model, "fc", nn.Linear).weight, saved.fc.weight)


def test_densenets_old_dotted_names_load():
    model = resolve_model("densenet121").build(3)
    state = {re.sub(r"(denselayer\d+\.(?:norm|conv))(\d)", r"\1.\2", k): v for k, v in model.state_dict().items()}
    assert any(".norm.1.weight" in key for key in state)
    other = resolve_model("densenet121").build(3)
    load_into(other, checkpoint_of(state), Path("net.pt"))
    assert_same(other.state_dict(), model.state_dict())


def test_a_model_that_checks_its_versions_loads_with_and_without_them(tmp_path):
    model = resolve_model("mnasnet0_5").build(3)
    torch.save(model.state_dict(), tmp_path / "net.pt")
    save_file(dict(model.state_dict()), tmp_path / "net.safetensors")
    for name in ("net.pt", "net.safetensors"):
        other = resolve_model("mnasnet0_5").build(3)
        load_into(other, read_checkpoint(tmp_path / name), tmp_path / name)
        assert_same(other.state_dict(), model.state_dict())


def test_a_wrong_name_of_weights_lists_the_right_ones():
    with pytest.raises(UserError, match=r"no weights 'IMAGENET'.*DEFAULT, IMAGENET1K_V1"):
        with_named_weights(resolve_model("resnet18"), "IMAGENET")


def test_weights_are_taken_from_torchs_cache_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda *a, **k: pytest.fail("went to the network"))
    source = resolve_model("squeezenet1_1")
    (tmp_path / "checkpoints").mkdir()
    from torchvision.models import SqueezeNet1_1_Weights

    file = tmp_path / "checkpoints" / SqueezeNet1_1_Weights.DEFAULT.url.rsplit("/", 1)[1]
    model = source.build(1000)
    torch.save(model.state_dict(), file)
    assert_same(with_named_weights(source, "DEFAULT")[1].state, model.state_dict())


def test_without_a_network_the_message_says_where_the_file_would_have_to_be(tmp_path, monkeypatch):
    from urllib.error import URLError

    def offline(*_: Any, **__: Any) -> None:
        raise URLError("Name or service not known")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    with pytest.raises(UserError, match=re.escape(f"put their file at {tmp_path}/checkpoints/resnet18-")):
        with_named_weights(resolve_model("resnet18"), "DEFAULT")
