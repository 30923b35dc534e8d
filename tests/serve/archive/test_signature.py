"""Who vouches for an archive, and what a starter loads."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import stat
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from serve.archive.archive_file import check_archive
from serve.archive.signature import SignatureError, sign, signature_path, verify
from serve.archive.verification import Policy, policy_of, verified_copy
from serve.cli import app
from serve.common import layout
from serve.runtime.card.card import CARD_FILE, Card, load_card, parse_card, write_card
from serve.runtime.errors import CardError, PipelineError, UserError
from serve.torchserve import server
from serve.torchserve.archive_builder import build_archive, foreign_parts
from serve.torchserve.launcher import GROOVY
from serve.torchserve.state import state_folder
from tests.serve import artifacts
from tests.serve.conftest import free_ports


@dataclasses.dataclass(frozen=True)
class Keys:
    private: Path
    public: Path


def make_keys(folder: Path, name: str, password: str | None = None) -> Keys:
    key = ec.generate_private_key(ec.SECP256R1())
    encryption = (
        serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password.encode())
    )
    pem = serialization.Encoding.PEM
    keys = Keys(folder / f"{name}.key", folder / f"{name}.pub")
    keys.private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption))
    keys.public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return keys


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact's folder, and beside it its archive ``small-script.mar``."""
    folder = artifacts.torchscript(tmp_path_factory.mktemp("signing") / "script")
    build_archive(folder, folder.parent / "small-script.mar", model_name="small-script")
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "script"))


@pytest.fixture
def archive(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original.parent / "small-script.mar", tmp_path))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys"), "release")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys"), "other")


@pytest.fixture
def private(tmp_path: Path) -> Path:
    path = tmp_path / "private"
    path.mkdir(mode=0o700)
    return path


def flip(path: Path, place: int = -100) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def forged(archive: Path, change: Callable[[dict[str, bytes]], dict[str, bytes]]) -> None:
    """Change an archive as an attacker would: every hash in it, and the card's seal, fits again."""
    with zipfile.ZipFile(archive) as opened:
        files = {name: opened.read(name) for name in opened.namelist()}
    card = parse_card(files.pop(CARD_FILE).decode(), archive)
    files = change(files)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    card = dataclasses.replace(
        card,
        files={name: digest for name, digest in digests.items() if name in card.files},
        packed={name: digest for name, digest in digests.items() if name not in card.files},
    )
    rewrite(archive, files, card)


def rewrite(archive: Path, files: dict[str, bytes], card: Card) -> None:
    folder = archive.with_suffix(".card")
    folder.mkdir(exist_ok=True)
    write_card(folder, card)
    with zipfile.ZipFile(archive, "w") as written:
        for name, content in {**files, CARD_FILE: (folder / CARD_FILE).read_bytes()}.items():
            written.writestr(name, content)
    check_archive(archive)  # by its own words it is whole


def test_a_signature_is_ecdsa_over_the_archives_own_hash(archive: Path, keys: Keys) -> None:
    bundle = json.loads(sign(archive, keys.private).read_text())
    envelope = bundle["dsseEnvelope"]
    payload, kind = base64.b64decode(envelope["payload"]), envelope["payloadType"].encode()
    # DSSE's pre-authentication encoding.
    signed = b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
    public = serialization.load_pem_public_key(keys.public.read_bytes())
    assert isinstance(public, ec.EllipticCurvePublicKey)
    public.verify(base64.b64decode(envelope["signatures"][0]["sig"]), signed, ec.ECDSA(hashes.SHA256()))
    digests = [entry["digest"] for entry in json.loads(payload)["predicate"]["resources"]]
    assert digests == [hashlib.sha256(archive.read_bytes()).hexdigest()]


def test_whose_signature_holds_is_said(archive: Path, keys: Keys, others: Keys) -> None:
    sign(archive, keys.private)
    assert verify(archive, [others.public, keys.public]) == keys.public
    with pytest.raises(SignatureError, match=r"does not match other\.pub: Key mismatch"):
        verify(archive, [others.public])


@pytest.mark.parametrize("place", [10, 5000, -100])
def test_one_changed_bit_breaks_it(archive: Path, keys: Keys, place: int) -> None:
    sign(archive, keys.private)
    flip(archive, place)
    with pytest.raises(SignatureError, match="Signature mismatch"):
        verify(archive, [keys.public])


def test_an_attackers_signature_that_says_it_is_by_the_right_key_does_not_hold(
    archive: Path, keys: Keys, others: Keys
) -> None:
    hint = json.loads(sign(archive, keys.private).read_text())["verificationMaterial"]
    theirs = json.loads(sign(archive, others.private).read_text())
    signature_path(archive).write_text(json.dumps({**theirs, "verificationMaterial": hint}))
    with pytest.raises(SignatureError, match="signed with another key, or changed"):
        verify(archive, [keys.public])


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"mediaType": 3}', b"[" * 100_000])
def test_what_is_no_signature_is_refused_in_one_line(archive: Path, keys: Keys, content: bytes) -> None:
    signature_path(archive).write_bytes(content)
    with pytest.raises(SignatureError) as caught:
        verify(archive, [keys.public])
    assert "\n" not in str(caught.value)


def test_a_key_with_a_password_signs_with_it_only(archive: Path, tmp_path: Path) -> None:
    keys = make_keys(tmp_path, "secret", "open sesame")
    with pytest.raises(UserError, match=r"secret\.key: cannot sign"):
        sign(archive, keys.private)
    with pytest.raises(UserError, match=r"secret\.key: cannot sign"):
        sign(archive, keys.private, password="open barley")
    sign(archive, keys.private, password="open sesame")
    assert verify(archive, [keys.public]) == keys.public


@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN PRIVATE KEY-----\n"])
def test_what_is_no_key_is_named(archive: Path, keys: Keys, tmp_path: Path, content: bytes | None) -> None:
    key = tmp_path / "broken.pem"
    if content is not None:
        key.write_bytes(content)
    with pytest.raises(UserError, match=r"broken\.pem: cannot sign"):
        sign(archive, key)
    sign(archive, keys.private)
    with pytest.raises(UserError, match=r"broken\.pem: cannot verify"):
        verify(archive, [key])


def test_a_folders_signature_covers_what_is_loaded_of_it_and_not_its_timings(folder: Path, keys: Keys) -> None:
    (folder / "timings.json").write_text("{}")
    sign(folder, keys.private)
    (folder / "timings.json").write_text('{"ms": 1}')
    verify(folder, [keys.public])
    flip(folder / "model.pt")
    with pytest.raises(SignatureError, match=r"model\.pt"):
        verify(folder, [keys.public])


def test_a_folder_is_not_served_otherwise_than_it_was_signed(folder: Path, keys: Keys) -> None:
    sign(folder, keys.private)
    (folder / "serving.json").write_text('{"executions": [{"engine": "torchscript"}]}')
    with pytest.raises(SignatureError, match=r"Extra files found.*serving\.json"):
        verify(folder, [keys.public])
    sign(folder, keys.private)
    (folder / "serving.json").unlink()
    with pytest.raises(SignatureError, match=r"Missing files.*serving\.json"):
        verify(folder, [keys.public])


def test_a_private_copy_is_loaded_and_stays_what_was_verified(archive: Path, keys: Keys, private: Path) -> None:
    sign(archive, keys.private)
    before = archive.read_bytes()
    copy = verified_copy(archive, Policy((keys.public,)), private, foreign=foreign_parts)
    assert [path.name for path in private.iterdir()] == ["small-script.mar"]
    assert copy == private / "small-script.mar"
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    flip(archive)
    assert copy.read_bytes() == before


@pytest.mark.parametrize("signed", [True, False])
def test_all_that_is_checked_of_a_copy_is_read_of_one_file(
    archive: Path, keys: Keys, private: Path, signed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    original = zipfile.ZipFile.__init__

    def counted(self: zipfile.ZipFile, file: Any, *arguments: Any, **options: Any) -> None:
        opened.append(file)
        original(self, file, *arguments, **options)

    sign(archive, keys.private)
    monkeypatch.setattr(zipfile.ZipFile, "__init__", counted)
    copy = verified_copy(archive, Policy((keys.public,) if signed else ()), private, foreign=foreign_parts)
    assert opened == [copy]


def test_a_folders_copy_loads(folder: Path, keys: Keys, private: Path) -> None:
    sign(folder, keys.private)
    copy = verified_copy(folder, Policy((keys.public,)), private, foreign=foreign_parts)
    assert stat.S_IMODE(copy.stat().st_mode) == 0o700
    assert load_card(copy) == load_card(folder)


@pytest.mark.parametrize("fault", ["unsigned", "other", "changed"])
def test_the_policy_refuses_and_leaves_nothing(
    archive: Path, keys: Keys, others: Keys, private: Path, fault: str
) -> None:
    if fault != "unsigned":
        sign(archive, (others if fault == "other" else keys).private)
    if fault == "changed":
        flip(archive)
    with pytest.raises(SignatureError, match="small-script"):
        verified_copy(archive, Policy((keys.public,)), private, foreign=foreign_parts)
    assert list(private.iterdir()) == []


def test_a_signed_archive_does_not_stand_in_for_another(archive: Path, keys: Keys, private: Path) -> None:
    sign(archive, keys.private)
    renamed = archive.rename(archive.with_name("small-better.mar"))
    signature_path(archive).rename(signature_path(renamed))
    verify(renamed, [keys.public])
    with pytest.raises(SignatureError, match="the signed archive of small-script, not of small-better"):
        verified_copy(renamed, Policy((keys.public,)), private, foreign=foreign_parts)


@pytest.mark.parametrize("fault", ["cut", "changed", "no zip", "of a folder", "signature"])
def test_what_is_wrong_with_a_copy_is_told_by_the_path_that_was_given(
    archive: Path, folder: Path, keys: Keys, private: Path, fault: str
) -> None:
    source, policy = archive, Policy()
    if fault == "signature":
        sign(archive, keys.private)
        flip(archive)
        policy = Policy((keys.public,))
    elif fault == "of a folder":
        source = folder
        (folder / "model.pt").write_bytes(b"other")
    elif fault == "changed":
        flip(archive)
    else:
        archive.write_bytes(archive.read_bytes()[:-100] if fault == "cut" else b"no zip")
    with pytest.raises((CardError, SignatureError)) as caught:
        verified_copy(source, policy, private, foreign=None)
    assert str(caught.value).startswith(str(source))
    assert str(private) not in str(caught.value)


def test_a_copy_is_not_made_where_others_write(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(UserError, match="must belong to this user alone"):
        verified_copy(archive, Policy(), tmp_path / "open", foreign=foreign_parts)


def test_links_and_pipes_among_an_artifacts_files_are_refused(folder: Path, private: Path) -> None:
    real = folder / "model.pt"
    moved = real.rename(folder.parent / "elsewhere.pt")
    real.symlink_to(moved)
    with pytest.raises(CardError, match="is a link"):
        verified_copy(folder, Policy(), private, foreign=foreign_parts)
    real.unlink()
    os.mkfifo(real)
    with pytest.raises(CardError, match="not a regular file"):
        verified_copy(folder, Policy(), private, foreign=foreign_parts)
    assert list(private.iterdir()) == []


EVIL = b"import os; os.system('id')\n"


@pytest.mark.parametrize(
    "name", ["handler.py", "serve/runtime/service/execution_chain.py", "serve/__init__.py", "torch.py"]
)
def test_an_unsigned_archive_with_other_code_is_not_given_to_torchserve(
    archive: Path, private: Path, name: str
) -> None:
    forged(archive, lambda files: {**files, name: EVIL})
    with pytest.raises(SignatureError, match=name):
        verified_copy(archive, Policy(), private, foreign=foreign_parts)
    assert list(private.iterdir()) == []
    for policy, foreign in ((Policy(foreign_code=True), foreign_parts), (Policy(), None)):
        copy = verified_copy(archive, policy, private, foreign=foreign)
        assert copy.read_bytes() == archive.read_bytes()
        copy.unlink()


def test_code_that_calls_itself_the_model_is_code(archive: Path, private: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        files = {name: opened.read(name) for name in opened.namelist()}
    card = parse_card(files.pop(CARD_FILE).decode(), archive)
    del files[card.file]
    files["torch.py"] = EVIL
    rewrite(
        archive, files, dataclasses.replace(card, file="torch.py", files={"torch.py": hashlib.sha256(EVIL).hexdigest()})
    )
    with pytest.raises(SignatureError, match=r"torch\.py|MANIFEST"):
        verified_copy(archive, Policy(), private, foreign=foreign_parts)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("MAR-INF/MANIFEST.json", b'"handler.py"', b'"image_classifier"'),  # TorchServe's own, which unpickles
        ("MAR-INF/MANIFEST.json", b'"modelVersion"', b'"requirementsFile": "r.txt", "modelVersion"'),
        ("model-config.yaml", b"minWorkers: 1", b"minWorkers: 99"),
    ],
)
def test_torchserve_is_not_told_otherwise_than_serving_json_says(
    archive: Path, private: Path, name: str, old: bytes, new: bytes
) -> None:
    with zipfile.ZipFile(archive) as opened:
        assert old in opened.read(name)
    forged(archive, lambda files: {**files, name: files[name].replace(old, new)})
    with pytest.raises(SignatureError, match=name):
        verified_copy(archive, Policy(), private, foreign=foreign_parts)


def test_the_stores_settings_say_whose_signature_is_required(tmp_path: Path, keys: Keys, others: Keys) -> None:
    assert policy_of(tmp_path) == Policy()
    shutil.copy(keys.public, tmp_path / "release.pub")
    settings = tmp_path / "serve.toml"
    settings.write_text('[signing]\nrequire = ["release.pub"]\n')
    assert policy_of(tmp_path) == Policy((tmp_path / "release.pub",))
    assert policy_of(tmp_path, [others.public]).keys == (others.public,)
    settings.write_text("[known]\nrequire = true\n")
    assert policy_of(tmp_path) == policy_of(tmp_path / "none", known=True) == Policy(known=True)
    for text, message in {
        '[signing]\nrequired = ["release.pub"]\n': "unknown .did you mean require",
        '[signing]\nrequire = "release.pub"\n': "require",
        '[signing]\nrequire = ["lost.pub"]\n': "there is no such public key",
        "signing = 3\n": "must be a table",
        "known = true\n": "known must be a table",
        "[known]\nrequired = true\n": "unknown .did you mean require",
        '[known]\nrequire = "maybe"\n': "require",
        "[signing\n": "cannot be read",
        '[Signing]\nrequire = ["release.pub"]\n': r"unknown name 'Signing'.*the tables are \[signing\] and \[known\]",
        'require = ["release.pub"]\n': "unknown name 'require'",
    }.items():
        settings.write_text(text)
        with pytest.raises(UserError, match=message):
            policy_of(tmp_path)


@given(st.one_of(st.text(max_size=200), st.text(max_size=60).map(lambda text: f"[signing]\nrequire = {text}\n")))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_settings_are_a_policy_or_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "serve.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        policy = policy_of(tmp_path)
    except UserError as error:
        assert str(error).startswith(str(tmp_path))  # noqa: PT017 - either is right
    else:
        assert policy == Policy(), "no key is there"


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
def test_a_signature_that_was_changed_anywhere_does_not_hold_or_says_the_same(
    archive: Path, keys: Keys, data: st.DataObject
) -> None:
    bundle = json.loads(sign(archive, keys.private).read_text())
    places = list(leaves(bundle))
    place = data.draw(st.sampled_from(places))
    value: Any = data.draw(st.one_of(st.none(), st.integers(), st.text(max_size=20), st.just([]), st.just({})))
    where = bundle
    for step in place[:-1]:
        where = where[step]
    before, where[place[-1]] = where[place[-1]], value
    signature_path(archive).write_text(json.dumps(bundle))
    try:
        verify(archive, [keys.public])
    except SignatureError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        # With a key of one's own nothing depends on what the bundle says of it; that is not signed.
        assert place[0] == "verificationMaterial" or place[-1] in ("mediaType", "keyid") or value == before


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*path, name)
            yield from leaves(item, (*path, name))


def test_the_server_is_not_started_with_what_the_policy_refuses(archive: Path, keys: Keys, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with pytest.raises(SignatureError, match="not signed"):
        server.start(store, {"small-script": archive}, policy=Policy((keys.public,)))
    assert server.running(store) is None
    assert not (state_folder(store) / "archives").exists()
    forged(archive, lambda files: {**files, "handler.py": EVIL})
    with pytest.raises(SignatureError, match="--foreign-code"):
        server.start(store, {"small-script": archive})


@pytest.mark.slow
def test_a_signed_archive_is_served_and_what_happens_to_the_stores_own_file_then_is_nothing_to_the_server(
    original: Path, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nor is there a place for our main as it is compiled: its text is run.
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    folder = layout.artifact_folder(tmp_path, "small", "script")
    shutil.copytree(original, folder)
    archive = build_archive(folder, layout.archive_path(tmp_path, "small", "script"), model_name="small-script")
    sign(archive, keys.private)
    policy = Policy((keys.public,))
    image = artifacts.jpeg(2)
    running = server.start(tmp_path, {"small-script": archive}, ports=free_ports(), policy=policy, deadline_s=200)
    try:
        assert GROOVY in psutil.Process(running.pid).cmdline()
        with running.client(tmp_path) as client:
            before = client.predict("small-script", image)
            archive.write_bytes(b"something else")
            (worker,) = client.workers("small-script")
            psutil.Process(int(worker["pid"])).kill()  # the next one loads the model again
            deadline = time.monotonic() + 90
            while time.monotonic() < deadline:
                with contextlib.suppress(PipelineError):
                    assert client.predict("small-script", image) == before
                    break
                time.sleep(0.5)
            else:
                pytest.fail("the worker was not restarted")
    finally:
        server.stop(tmp_path)


def test_the_commands_sign_and_verify(archive: Path, keys: Keys, others: Keys) -> None:
    run = CliRunner().invoke
    unsigned = run(app, ["verify", str(archive), "--key", str(keys.public)])
    assert (unsigned.exit_code, unsigned.output.count("\n")) == (1, 1)
    assert "is not signed" in unsigned.output
    signed = run(app, ["sign", str(archive), "--key", str(keys.private)])
    assert (signed.exit_code, signed.output.strip()) == (0, f"{archive}.sig")
    assert run(app, ["verify", str(archive), "--key", str(others.public)]).exit_code == 1
    verified = run(app, ["verify", str(archive), "--key", str(others.public), "--key", str(keys.public)])
    assert (verified.exit_code, verified.output.strip()) == (0, f"{archive}: whole, and signed by {keys.public}")


def test_a_runs_archives_are_signed_as_they_are_packed(original: Path, keys: Keys, tmp_path: Path) -> None:
    shutil.copytree(original, tmp_path / "small" / "artifacts" / "script")
    result = CliRunner().invoke(app, ["package", "small", "--store", str(tmp_path), "--sign", str(keys.private)])
    assert result.exit_code == 0, result.output
    assert verify(tmp_path / "small" / "archives" / "small-script.mar", [keys.public]) == keys.public
