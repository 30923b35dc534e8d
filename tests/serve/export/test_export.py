"""What is written for other engines and clusters is what their published schemas say, and serves what it is of."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.metadata
import importlib.util
import re
import shutil
import types
import typing
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import yaml
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError
from tritonclient.grpc import model_config_pb2
from typer.testing import CliRunner

from benchmarks.hostile.pictures import encoded, picture
from serve.archive.archive_file import check_archive
from serve.asgi.process.serving_plan import Plan
from serve.cli import app
from serve.export.base import ExportSettings, Subject, dns_name, targets
from serve.export.pbtxt import text
from serve.export.triton import readme as triton_readme
from serve.runtime.card.card import Preprocessing, load_card, read_card, sha256_file, write_card
from serve.runtime.card.execution import Execution
from serve.runtime.card.serving import Serving
from serve.runtime.images.image_preprocessing import load
from serve.runtime.service.predictor import Predictor
from serve.torchserve.archive_builder import serving_of
from tests.serve import artifacts
from tests.serve.archive.test_signature import make_keys
from tests.serve.asgi.process.test_metrics import ask, grouped_by, scrape, selectors
from tests.serve.own_process import running
from tests.serve.own_server import Running, bearer

KUBERNETES = "1.37"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exports")
    onnx = artifacts.onnx(root / "small" / "artifacts" / "onnx")
    # As it was tuned on the machine that exports.
    (onnx / "serving.json").write_text(dataclasses.replace(serving_of(onnx, load_card(onnx)), workers=2).text)
    artifacts.torchscript(root / "small" / "artifacts" / "script")
    return root


def export(store: Path, out: Path, *words: str) -> str:
    result = CliRunner().invoke(app, ["export", "small", "--store", str(store), "--out", str(out), *words])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def kubernetes(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kubernetes") / "out"
    keys = make_keys(out.parent, "release")
    words = (
        "--artifact",
        "onnx",
        "--cpus",
        "3",
        "--replicas",
        "2",
        "--queue-ms",
        "15",
        "--image",
        "registry/own@sha256:0",
    )
    export(store, out, "--to", "kubernetes", *words, "--sign", str(keys.private), "--public-key", str(keys.public))
    return out


@pytest.fixture(scope="module")
def manifests(kubernetes: Path) -> dict[str, dict[str, Any]]:
    documents = yaml.safe_load_all((kubernetes / "manifests.yaml").read_text())
    return {document["kind"]: document for document in documents}


def test_every_target_is_found_by_being_there() -> None:
    assert set(targets()) == {"kubernetes", "kserve", "triton"}


def test_every_manifest_is_what_kubernetes_says(manifests: dict[str, dict[str, Any]]) -> None:
    assert set(manifests) == {
        *("ServiceAccount", "ConfigMap", "Deployment", "Service"),
        *("HorizontalPodAutoscaler", "PodDisruptionBudget", "NetworkPolicy"),
    }
    for document in manifests.values():
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        assert document["metadata"]["namespace"] == "default"


def test_the_schemas_would_refuse_a_slip(manifests: dict[str, dict[str, Any]]) -> None:
    slip = yaml.safe_load(yaml.safe_dump(manifests["Deployment"]))
    slip["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(slip, KUBERNETES, strict=True)


def pod_of(manifests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return dict(manifests["Deployment"]["spec"]["template"]["spec"])


def test_the_pod_may_do_nothing_that_it_need_not(manifests: dict[str, dict[str, Any]]) -> None:
    pod = pod_of(manifests)
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    mounted = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}
    writable = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume}
    assert {name for name, mount in mounted.items() if not mount.get("readOnly")} == writable
    assert manifests["NetworkPolicy"]["spec"]["egress"] == []
    assert container["image"] == "registry/own@sha256:0"


def test_the_probes_ask_what_the_server_answers_without_a_token(manifests: dict[str, dict[str, Any]]) -> None:
    (container,) = pod_of(manifests)["containers"]
    asked = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert asked == {
        "startupProbe": "/health/ready",
        "livenessProbe": "/health/live",
        "readinessProbe": "/health/ready",
    }


def test_what_is_accepted_is_answered_before_the_kill(manifests: dict[str, dict[str, Any]]) -> None:
    pod = pod_of(manifests)
    arguments = pod["containers"][0]["args"]
    drain = sum(float(arguments[arguments.index(word) + 1]) for word in ("--drain-delay", "--drain-timeout"))
    assert pod["terminationGracePeriodSeconds"] > drain


def test_the_arguments_are_options_of_the_own_server(manifests: dict[str, dict[str, Any]]) -> None:
    shown = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})
    assert shown.exit_code == 0, shown.output
    known = set(re.findall(r"--[a-z][a-z-]+", shown.output))
    arguments = pod_of(manifests)["containers"][0]["args"]
    assert {word for word in arguments if word.startswith("--")} <= known


@pytest.mark.slow
def test_the_own_server_starts_as_the_pod_says_and_its_probes_are_answered(
    kubernetes: Path, manifests: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Everything but the container around it: the same arguments, with what is mounted there lying here."""
    pod = pod_of(manifests)
    (container,) = pod["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    (tmp_path / "tokens").write_text("a-token-of-24-characters\n")
    (tmp_path / "tokens").chmod(0o600)
    (tmp_path / "release.pub").write_text(manifests["ConfigMap"]["data"]["release.pub"])
    there = {
        "/models": kubernetes / "image" / "models",
        mounted["tokens"]: tmp_path,
        mounted["keys"]: tmp_path,
    }
    arguments = list(container["args"])
    arguments[arguments.index("--host") + 1] = "127.0.0.1"  # nobody else is let in here
    arguments[arguments.index("--port") + 1] = "0"
    for place, folder in there.items():
        arguments = [re.sub(f"^{place}/", f"{folder}/", word) for word in arguments]
    with running(tmp_path / "store", *arguments) as server:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert httpx.get(server.url + container[probe]["httpGet"]["path"], trust_env=False).status_code == 200
        ask = functools.partial(
            httpx.post, f"{server.url}/predictions/small-onnx", content=artifacts.jpeg(1), trust_env=False
        )
        assert ask().status_code == 401
        assert ask(headers={"authorization": "Bearer a-token-of-24-characters"}).status_code == 200


def test_the_archive_is_packed_for_the_replicas_cores_and_signed(
    kubernetes: Path, manifests: dict[str, dict[str, Any]]
) -> None:
    archive = kubernetes / "image" / "models" / "small-onnx.mar"
    check_archive(archive)
    arguments = pod_of(manifests)["containers"][0]["args"]
    assert arguments[0] == "/models/small-onnx.mar"
    with zipfile.ZipFile(archive) as opened:
        serving = yaml.safe_load(opened.read("serving.json"))
    assert {entry["threads"] for entry in serving["executions"] if entry["device"] == "cpu"} == {3}
    assert serving["decode_threads"] == 3
    assert serving["workers"] == 1, "a cluster has replicas"
    key = kubernetes.parent / "release.pub"
    verified = CliRunner().invoke(app, ["verify", str(archive), "--key", str(key)])
    assert verified.exit_code == 0, verified.output
    required = arguments[arguments.index("--require-signed") + 1]
    mounted = {mount["name"]: mount["mountPath"] for mount in pod_of(manifests)["containers"][0]["volumeMounts"]}
    assert required == f"{mounted['keys']}/release.pub"
    assert manifests["ConfigMap"]["data"]["release.pub"] == key.read_text()


def test_it_scales_on_the_time_that_requests_wait(kubernetes: Path, manifests: dict[str, dict[str, Any]]) -> None:
    spec = manifests["HorizontalPodAutoscaler"]["spec"]
    (metric,) = spec["metrics"]
    assert metric["pods"]["target"] == {"type": "AverageValue", "averageValue": "15m"}  # thousandths of a second
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 8)
    (rule,) = yaml.safe_load((kubernetes / "prometheus-adapter.yaml").read_text())["rules"]
    assert rule["name"]["as"] == metric["pods"]["metric"]["name"]
    assert 'serve_stage_seconds_sum{<<.LabelMatchers>>,stage="queue"}' in rule["metricsQuery"]
    assert "replicas" not in manifests["Deployment"]["spec"]


def test_the_adapters_queries_are_promql_over_what_a_pod_tells(kubernetes: Path, own_server: Running) -> None:
    """Its templates are filled as prometheus-adapter does it for two pods of a namespace."""
    (rule,) = yaml.safe_load((kubernetes / "prometheus-adapter.yaml").read_text())["rules"]
    pods = {"namespace": "default", "pod": "small-onnx-1|small-onnx-2"}
    filled = {"LabelMatchers": 'namespace="default",pod=~"small-onnx-1|small-onnx-2"', "GroupBy": "pod"}
    query = re.sub(r"<<\.(\w+)>>", lambda field: filled[field[1]], rule["metricsQuery"])
    assert "<<" not in query
    assert set(rule["resources"]["overrides"]) == set(pods), "by which labels the adapter finds a pod"
    with httpx.Client(base_url=f"http://{own_server.http}", headers=bearer(), trust_env=False) as client:
        assert ask(client, [artifacts.jpeg()]).status_code == 200
        scraped = {sample.name: sample.labels for sample in scrape(client).samples}
    (of_series,) = selectors(rule["seriesQuery"])
    of_query = selectors(query)
    assert {entry.name for entry in of_query} == {"serve_stage_seconds_sum", "serve_stage_seconds_count"}
    assert of_series.name in {entry.name for entry in of_query}
    for entry in (of_series, *of_query):
        # What Prometheus' operator adds to the labels of a pod's samples: its namespace and its name.
        assert {label.name for label in entry.matchers.matchers} <= scraped[entry.name].keys() | pods.keys()
        assert ("stage", "queue") in {(label.name, label.value) for label in entry.matchers.matchers}
    for entry in of_query:
        found = {label.name: label.value for label in entry.matchers.matchers}
        assert found == {**pods, "stage": "queue"}
    assert grouped_by(query) == {"pod"}


def test_prometheus_scrapes_the_pods_with_a_token(kubernetes: Path, manifests: dict[str, dict[str, Any]]) -> None:
    monitor = yaml.safe_load((kubernetes / "podmonitor.yaml").read_text())
    template = manifests["Deployment"]["spec"]["template"]
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
    assert monitor["metadata"]["namespace"] == manifests["Deployment"]["metadata"]["namespace"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    assert endpoint["path"] == "/metrics"
    assert endpoint["authorization"]["type"] == "Bearer"
    assert endpoint["authorization"]["credentials"] == {"name": "small-onnx-scrape", "key": "token"}


class _Exact(BaseModel):
    """What takes no field that it does not know, and converts nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)


def pod_monitor_type() -> type[BaseModel]:
    """What a PodMonitor may be, by the types that were generated of the schema that Prometheus' operator publishes.

    Of their package only the fields are read: the rest builds them, and needs a library to ask clusters with.
    """
    try:
        package = importlib.metadata.distribution("cloudcoil.models.prometheus_operator")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the types of Prometheus' operator are not installed")
    source = Path(str(package.locate_file("cloudcoil/models/prometheus_operator/v1.py"))).read_text(encoding="utf-8")
    texts = dict(re.findall(r"^class (\w+)(\(.*?)(?=^class |\Z)", source, re.MULTILINE | re.DOTALL))
    classes: dict[str, ast.stmt] = {}  # each behind those that it names

    def add(name: str) -> None:
        (made,) = (node for node in ast.parse(f"class {name}{texts[name]}").body if isinstance(node, ast.ClassDef))
        made.body = [node for node in made.body if isinstance(node, ast.AnnAssign)] or [ast.Pass()]
        for node in ast.walk(made):
            if isinstance(node, ast.Name) and node.id in texts and node.id not in classes:
                add(node.id)
        classes[name] = made

    add("PodMonitor")
    names: dict[str, Any] = {name: getattr(typing, name) for name in typing.__all__}
    names |= {"BaseModel": _Exact, "Resource": _Exact, "RootModel": RootModel, "Field": Field}
    names["apimachinery"] = types.SimpleNamespace(ObjectMeta=dict[str, Any])
    module = ast.Module([*classes.values()], [])
    exec(compile(module, "prometheus-operator", "exec", dont_inherit=True), names)  # annotations are not texts there
    found: type[BaseModel] = names["PodMonitor"]
    return found


def test_the_pod_monitor_is_what_prometheus_operator_says(kubernetes: Path) -> None:
    monitor = yaml.safe_load((kubernetes / "podmonitor.yaml").read_text())
    kind = pod_monitor_type()
    kind.model_validate(monitor)
    bare = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": monitor["metadata"]}
    kubernetes_validate.validate(bare, KUBERNETES, strict=True)
    slips: list[tuple[dict[str, Any], str]] = [
        ({"interval": "15 seconds"}, "interval"),
        ({"intervall": "15s"}, "intervall"),
        ({"authorization": {"credentials": {"name": "small-onnx-scrape"}}}, "key"),
        ({"port": 8080}, "port"),
    ]
    for slip, where in slips:
        wrong = yaml.safe_load(yaml.safe_dump(monitor))
        wrong["spec"]["podMetricsEndpoints"][0].update(slip)
        with pytest.raises(ValidationError) as caught:
            kind.model_validate(wrong)
        assert [error["loc"][-1] for error in caught.value.errors()] == [where]


def test_the_steps_make_the_secrets_that_the_files_name(store: Path, tmp_path: Path) -> None:
    told = export(store, tmp_path / "out", "--to", "kubernetes", "--artifact", "onnx")
    assert "create secret generic small-onnx-tokens --from-file=tokens=" in told
    assert "create secret generic small-onnx-scrape --from-file=token=" in told
    assert "tr -d '\\n'" in told


def test_no_file_of_an_export_holds_a_secret_or_this_machines_paths(kubernetes: Path, store: Path) -> None:
    written = [path for path in kubernetes.rglob("*") if path.is_file()]
    assert {"manifests.yaml", "Dockerfile"} <= {path.name for path in written}
    for path in written:
        content = path.read_bytes()
        for secret in ("PRIVATE KEY", str(store), str(kubernetes)):
            assert secret.encode() not in content, path


class Kserve:
    """KServe's own models of its resources, read from its SDK without what that runs with."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("kserve")
        if spec is None or not spec.submodule_search_locations:
            pytest.skip("KServe's SDK is not installed")
        self._folder = Path(next(iter(spec.submodule_search_locations)))

    def faults(self, kind: str, value: Any, where: str = "") -> Iterator[str]:
        """Fields of a value that a type of the SDK does not have, and values of another type."""
        if found := re.fullmatch(r"list\[(.+)\]", kind):
            if not isinstance(value, list):
                yield f"{where}: no list"
                return
            for entry in value:
                yield from self.faults(found[1], entry, f"{where}[]")
        elif kind in ("str", "bool", "int"):
            if type(value).__name__ != kind:
                yield f"{where}: {value!r} is no {kind}"
        elif kind.startswith(("V1alpha1", "V1beta1")):
            model = self._model(kind)
            by_key = {key: name for name, key in model.attribute_map.items()}
            for key, entry in value.items():
                if key not in by_key:
                    yield f"{where}.{key}: unknown"
                else:
                    yield from self.faults(model.openapi_types[by_key[key]], entry, f"{where}.{key}")

    def _model(self, kind: str) -> Any:
        snake = re.sub(r"(?<!^)(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])", "_", kind).lower()
        path = self._folder / "models" / f"{snake}.py"
        assert path.is_file(), f"the SDK has no {kind}"
        (body,) = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
        tables = {
            target.id: ast.literal_eval(node.value)
            for node in body.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name) and target.id in ("openapi_types", "attribute_map")
        }
        return types.SimpleNamespace(**tables)


@pytest.fixture(scope="module")
def kserve(store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("kserve") / "out"
    export(store, out, "--to", "kserve", "--artifact", "onnx")
    return {entry["kind"]: entry for entry in yaml.safe_load_all((out / "inferenceservice.yaml").read_text())}


def test_the_resources_are_what_kserves_sdk_says(kserve: dict[str, dict[str, Any]]) -> None:
    sdk = Kserve()
    assert list(sdk.faults("V1alpha1ServingRuntime", kserve["ServingRuntime"])) == []
    assert list(sdk.faults("V1beta1InferenceService", kserve["InferenceService"])) == []
    slip = {**kserve["InferenceService"], "spec": {"predictor": {"minReplica": 1, "maxReplicas": "8"}}}
    assert list(sdk.faults("V1beta1InferenceService", slip)) == [
        ".spec.predictor.minReplica: unknown",
        ".spec.predictor.maxReplicas: '8' is no int",
    ]


def test_the_pod_that_kserve_makes_of_them_is_what_kubernetes_says(kserve: dict[str, dict[str, Any]]) -> None:
    runtime = kserve["ServingRuntime"]["spec"]
    predictor = kserve["InferenceService"]["spec"]["predictor"]
    spec = {"containers": runtime["containers"], "volumes": runtime["volumes"]}
    spec |= {
        name: predictor[name]
        for name in ("securityContext", "terminationGracePeriodSeconds", "automountServiceAccountToken")
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    assert runtime["containers"][0]["name"] == "kserve-container"
    (model_format,) = runtime["supportedModelFormats"]
    assert predictor["model"]["modelFormat"] == {name: model_format[name] for name in ("name", "version")}
    assert predictor["model"]["runtime"] == kserve["ServingRuntime"]["metadata"]["name"]
    assert predictor["model"]["protocolVersion"] in runtime["protocolVersions"]


def test_kserve_asks_for_a_model_by_the_name_of_its_inference_service(tmp_path: Path) -> None:
    artifacts.onnx(tmp_path / "Net_2.x" / "artifacts" / "onnx")
    out = tmp_path / "out"
    words = ["export", "Net_2.x", "--store", str(tmp_path), "--out", str(out), "--to", "kserve"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    found = {entry["kind"]: entry for entry in yaml.safe_load_all((out / "inferenceservice.yaml").read_text())}
    (container,) = found["ServingRuntime"]["spec"]["containers"]
    word = container["args"][0].replace("/models/", f"{out}/image/models/")
    (wanted,) = Plan((word,), None, tmp_path).read()
    assert wanted.name == found["InferenceService"]["metadata"]["name"] == "net-2-x-onnx"
    assert wanted.archive == out / "image" / "models" / "Net_2.x-onnx.mar"


@pytest.fixture(scope="module")
def triton(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("triton") / "out"
    export(store, out, "--to", "triton")
    return out


def test_tritons_configuration_is_what_its_proto_says(triton: Path) -> None:
    config = text_format.Parse((triton / "small-onnx" / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    session = onnxruntime.InferenceSession(str(triton / "small-onnx" / "1" / "model.onnx"))
    assert config.name == "small-onnx"
    assert config.backend == "onnxruntime"
    assert config.max_batch_size == 16
    assert [(entry.name, list(entry.dims)) for entry in config.input] == [(session.get_inputs()[0].name, [3, 32, 32])]
    assert config.input[0].data_type == model_config_pb2.TYPE_FP32
    assert [(entry.name, list(entry.dims)) for entry in config.output] == [(session.get_outputs()[0].name, [5])]
    assert config.HasField("dynamic_batching")
    assert config.dynamic_batching.max_queue_delay_microseconds == 1000
    assert config.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_CPU
    assert (triton / "small-onnx" / config.output[0].label_filename).read_text().split() == list(artifacts.CLASSES)


def test_triton_gives_the_maps_that_end_a_graph_and_a_number_for_an_image_has_no_dimension(tmp_path: Path) -> None:
    folder = artifacts.onnx(tmp_path / "store" / "small" / "artifacts" / "onnx")
    model = onnx.load(folder / "model.onnx")
    value = onnx.helper.make_tensor_value_info
    cast = onnx.helper.make_node("Cast", ["logits"], ["classes"], to=onnx.TensorProto.UINT8)
    axes = onnx.numpy_helper.from_array(np.array([1]), "axes")
    total = onnx.helper.make_node("ReduceSum", ["logits", "axes"], ["total"], keepdims=0)
    model.graph.node.extend([cast, total])
    model.graph.initializer.append(axes)
    model.graph.output.append(value("classes", onnx.TensorProto.UINT8, ["batch", 5]))
    model.graph.output.append(value("total", onnx.TensorProto.FLOAT, ["batch"]))
    onnx.save(model, folder / "model.onnx")
    card = read_card(folder)
    files = {"model.onnx": sha256_file(folder / "model.onnx")}
    write_card(folder, dataclasses.replace(card, files=files, ending=("classes", "total"), task="segmentation"))
    export(tmp_path / "store", tmp_path / "out", "--to", "triton")
    written = tmp_path / "out" / "small-onnx" / "config.pbtxt"
    logits, classes, sums = text_format.Parse(written.read_text(), model_config_pb2.ModelConfig()).output
    assert (classes.name, classes.data_type, list(classes.dims)) == ("classes", model_config_pb2.TYPE_UINT8, [5])
    assert (list(sums.dims), sums.HasField("reshape"), list(sums.reshape.shape)) == ([1], True, [])
    assert not logits.label_filename
    assert "ask for this output alone" in (tmp_path / "out" / "README.md").read_text()


def test_triton_prefers_no_batch_above_its_largest(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store" / "small" / "artifacts" / "onnx"
    shutil.copytree(store / "small" / "artifacts" / "onnx", folder)
    usual = Serving((Execution("onnxruntime", buckets=(1, 4, 16)),), batch_size=8)
    (folder / "serving.json").write_text(usual.text)
    export(tmp_path / "store", tmp_path / "out", "--to", "triton")
    written = tmp_path / "out" / "small-onnx" / "config.pbtxt"
    config = text_format.Parse(written.read_text(), model_config_pb2.ModelConfig())
    assert config.max_batch_size == 8
    assert list(config.dynamic_batching.preferred_batch_size) == [1, 4]


def test_an_image_prepared_as_the_readme_says_gets_the_logits_of_the_artifact(triton: Path, store: Path) -> None:
    readme = (triton / "README.md").read_text()
    resize = int(re.search(r"shorter side has (\d+) pixels", readme)[1])  # type: ignore[index]
    crop = int(re.search(r"cut (\d+) x", readme)[1])  # type: ignore[index]
    mean, std = (
        np.array(yaml.safe_load(re.search(rf"{word} (\[[^]]+\])", readme)[1]))  # type: ignore[index]
        for word in ("mean", "divide by")
    )
    from torchvision.transforms import v2

    pixels = v2.functional.pil_to_tensor(picture(3))
    small = v2.CenterCrop(crop)(v2.Resize(resize, antialias=True)(pixels)).numpy()
    inputs = ((small / 255 - mean[:, None, None]) / std[:, None, None]).astype("float32")[None]
    session = onnxruntime.InferenceSession(str(triton / "small-onnx" / "1" / "model.onnx"))
    (logits,) = session.run(None, {session.get_inputs()[0].name: inputs})
    predictor = Predictor(store / "small" / "artifacts" / "onnx")
    probabilities = torch.softmax(torch.from_numpy(logits[0]), 0)
    (answer,) = predictor.predict([encoded(picture(3), "PNG")])
    expected = {entry.index: entry.probability for entry in answer}  # type: ignore[union-attr]
    for index, probability in expected.items():
        assert probabilities[index].item() == pytest.approx(probability, abs=2e-3)


def test_an_image_framed_as_the_readme_says_is_the_letterbox_of_our_own_server(store: Path) -> None:
    folder = store / "small" / "artifacts" / "onnx"
    letterbox = Preprocessing("letterbox", (40, 33))
    card = dataclasses.replace(load_card(folder), preprocessing=letterbox)
    readme = triton_readme(Subject("small", folder, card, ExportSettings()))
    rows, columns, grey = map(
        int,
        re.search(r"fits into (\d+) x (\d+) pixels.*\n.*middle of 40 x 33 .* grey \((\d+) in", readme).groups(),  # type: ignore[union-attr]
    )
    image = picture(3, (61, 90))
    size = round(61 * rows / 90), rows
    left = (columns - size[0]) // 2
    framed = Image.new("RGB", (columns, rows), (grey, grey, grey))
    framed.paste(image.resize(size, Image.Resampling.BILINEAR), (left, 0))
    served = load(encoded(image, "PNG"), letterbox).permute(1, 2, 0).int().numpy()
    assert np.abs(np.asarray(framed, dtype=int) - served).max() <= 1


@pytest.mark.parametrize("target", ["kubernetes", "kserve"])
def test_a_gpu_is_asked_for_where_one_is_wanted(target: str, store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(store, out, "--to", target, "--artifact", "onnx", "--gpus", "1", "--namespace", "vision")
    (path,) = [path for path in out.glob("*.yaml") if path.name not in ("prometheus-adapter.yaml", "podmonitor.yaml")]
    documents = {entry["kind"]: entry for entry in yaml.safe_load_all(path.read_text())}
    assert {entry["metadata"]["namespace"] for entry in documents.values()} == {"vision"}
    assert "ConfigMap" not in documents, "nothing is signed"
    (container,) = (
        documents["ServingRuntime"]["spec"]["containers"] if target == "kserve" else pod_of(documents)["containers"]
    )
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert container["args"][container["args"].index("--device") + 1] == "cuda"
    assert "--require-signed" not in container["args"]
    with zipfile.ZipFile(out / "image" / "models" / "small-onnx.mar") as opened:
        serving = yaml.safe_load(opened.read("serving.json"))
    devices = [entry["device"] for entry in serving["executions"]]
    assert devices == sorted(devices, reverse=True), "cuda before cpu"
    assert "cuda" in devices
    assert "nvidia/cuda" in (out / "image" / "Dockerfile").read_text()


def test_what_a_target_cannot_open_is_refused(store: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    base = ["export", "small", "--store", str(store), "--out", str(tmp_path / "out")]
    for words, message in {
        ("--to", "triton", "--artifact", "script"): "script is a torchscript file, but triton takes only onnx files",
        ("--to", "nomad"): "unknown export target 'nomad'",
        ("--to", "kubernetes"): "several suitable artifacts: choose one with --artifact onnx or script",
        ("--to", "kubernetes", "--artifact", "onyx"): "did you mean onnx",
        ("--to", "kubernetes", "--artifact", "onnx", "--gpus", "3"): "gpus",
        (
            "--to",
            "kserve",
            "--artifact",
            "onnx",
            "--replicas",
            "9",
            "--max-replicas",
            "3",
        ): "at least replicas (9), got 3",
        ("--to", "kserve", "--artifact", "onnx", "--public-key", "x.pub"): "a signed export needs two keys",
        ("--to", "kserve", "--artifact", "onnx", "--queue-ms", "9"): "kserve does not support queue-ms",
        ("--to", "triton", "--image", "a", "--replicas", "2"): "triton does not support image, replicas",
        ("--to", "triton", "--sign", "x", "--public-key", "x.pub"): "does not use archives, so they cannot be signed",
    }.items():
        result = run(app, [*base, *words])
        assert (result.exit_code, result.output.count("\n")) == (2, 1), result.output
        assert message in result.output
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("")
    result = run(app, [*base[:-1], str(tmp_path / "full"), "--to", "triton"])
    assert (result.exit_code, "is not empty" in result.output) == (2, True)


@given(st.text(max_size=80))
def test_any_name_becomes_one_that_kubernetes_takes(name: str) -> None:
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", dns_name(name))
    assert len(dns_name(name)) + len("-tokens") <= 63


def test_a_name_that_kubernetes_takes_stays_and_no_two_long_ones_become_one() -> None:
    assert dns_name("resnet18-onnx_int8") == "resnet18-onnx-int8"
    assert dns_name("3d-net-onnx") == "m-3d-net-onnx"
    assert dns_name("a" * 52) == "a" * 52
    run = "a-run-of-a-network-whose-name-is-longer-than-a-label-of-dns"
    names = [dns_name(f"{run}-{artifact}") for artifact in ("onnx", "onnx-int8", "ptq")]
    assert len(set(names)) == 3
    assert {name[:43] for name in names} == {run[:43]}


@pytest.mark.parametrize(("given_", "most"), [({}, 8), ({"replicas": 9}, 9), ({"replicas": 3, "max_replicas": 3}, 3)])
def test_there_are_never_fewer_replicas_at_most_than_at_least(given_: dict[str, int], most: int) -> None:
    assert ExportSettings(**given_).max_replicas == most


@given(st.dictionaries(st.sampled_from(["name", "backend", "default_model_filename"]), st.text(max_size=40)))
def test_any_text_is_read_back_from_pbtxt(message: Mapping[str, str]) -> None:
    try:
        for value in message.values():
            value.encode()
    except UnicodeEncodeError:
        return  # no text of a protocol buffer
    parsed = text_format.Parse(text(message), model_config_pb2.ModelConfig())
    assert {field.name: value for field, value in parsed.ListFields()} == {k: v for k, v in message.items() if v}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_dockerfiles_pin_their_base_and_end_as_nobody(kind: str) -> None:
    import serve.export

    path = Path(serve.export.__file__).parent / "docker" / f"Dockerfile.{kind}"
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    (base,) = [line for line in lines if line.startswith("ARG BASE=")]
    assert re.search(r":[0-9]+\.[0-9]+\.[0-9]+-", base), "a version, and not latest"
    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001:10001"]
    assert lines[-1] == 'ENTRYPOINT ["python", "-P", "-m", "serve", "run"]'
    assert any("-c constraints.txt" in line for line in lines)
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    for name in [name for names in copied for name in names]:
        assert (Path(__file__).parents[3] / name).exists(), name
