"""The Helm chart's other kind, KubeRay's RayService: `forerun deploy` takes its configuration, Kubernetes its pods."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart import TemplateError, rendered
from forerun.replicas.deployment import read_deployment
from tests.lab.test_chart import KEYS, KUBERNETES, kubernetes_validate, one

RAY: dict[str, Any] = {
    **KEYS,
    "kind": "ray",
    "replicas": 3,
    "resources": {"cpu": 6, "gpus": 1},
    "files": {"generation.json": "{}"},
    "ray": {"version": "2.60.0", "config": {"engine": {"max_num_seqs": 8}, "routing": "round_robin"}},
}
RAY_SCALED = {**RAY, "autoscaling": {"kind": "ray", "maxReplicas": 5, "ongoingRequests": 24}}


@pytest.mark.parametrize("values", [RAY, RAY_SCALED])
def test_a_ray_service_deploys_the_configuration(values: dict[str, Any], tmp_path: Path) -> None:
    """Its pods are pods that Kubernetes takes, and `forerun deploy` takes the file."""
    docs = rendered(values)
    service, secret = one(docs, "RayService")["spec"], one(docs, "Secret")
    serve, cluster = yaml.safe_load(service["serveConfigV2"]), service["rayClusterConfig"]
    [application] = serve["applications"]
    module, _, name = application["import_path"].partition(":")
    found = find_spec(module)
    assert found is not None and found.origin is not None
    assert f"def {name}(" in Path(found.origin).read_text("utf-8")
    assert serve["http_options"] == {"host": "0.0.0.0", "port": 8000}
    (tmp_path / "deploy.yaml").write_text(secret["stringData"]["deploy.yaml"], "utf-8")
    deployment = read_deployment(tmp_path / "deploy.yaml")
    assert deployment.engine_config().max_num_seqs == 8 and deployment.engine_config().threads is None
    assert deployment.api_keys == ("secret", "other") and deployment.drain_s == 60
    assert deployment.resources.num_gpus == 1 and deployment.http.port == 8000
    [workers] = cluster["workerGroupSpecs"]
    head, pods = cluster["headGroupSpec"]["template"], workers["template"]
    for template in (head, pods):
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        [each] = pod["spec"]["containers"]
        mounted = {mount["name"]: mount["mountPath"] for mount in each["volumeMounts"]}
        assert set(mounted) == {volume["name"] for volume in pod["spec"]["volumes"]}
        [kept] = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "deploy"]
        assert kept["secret"]["secretName"] == secret["metadata"]["name"]
        assert application["args"] == {"config": f"{mounted['deploy']}/deploy.yaml"}
    [each] = pods["spec"]["containers"]
    assert workers["rayStartParams"]["num-cpus"] == "6" and each["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert pods["spec"]["terminationGracePeriodSeconds"] > deployment.drain_s
    many = (workers["minReplicas"], workers["maxReplicas"])
    if values is RAY:
        assert many == (3, 3) and deployment.replicas == 3 and not cluster["enableInTreeAutoscaling"]
    else:
        scaling = deployment.autoscaling
        assert scaling is not None and many == (1, 5) and cluster["enableInTreeAutoscaling"]
        assert (scaling.max_replicas, scaling.target_ongoing_requests) == (5, 24)
    changed = one(rendered({**values, "drainSeconds": 61}), "Secret")
    assert changed["metadata"]["name"] != secret["metadata"]["name"]


def test_batches_need_the_shared_folder(tmp_path: Path) -> None:
    ray = {"version": "2.60.0", "config": {"server": {"batch_dir": "/shared/batches"}}}
    with pytest.raises(TemplateError, match=r"batch_dir needs ray\.sharedClaim"):
        rendered({**RAY, "ray": ray})
    docs = rendered({**RAY, "ray": {**ray, "sharedClaim": "many"}}, name="chat")
    [application] = yaml.safe_load(one(docs, "RayService")["spec"]["serveConfigV2"])["applications"]
    assert application["name"] == "chat"  # another release is refused by what batches say of their folder
    (tmp_path / "deploy.yaml").write_text(one(docs, "Secret")["stringData"]["deploy.yaml"], "utf-8")
    assert read_deployment(tmp_path / "deploy.yaml").settings().batch_dir == Path("/shared/batches")


@pytest.mark.parametrize(
    ("prefill", "more"), [({"replicas": 2}, 2), ({"resources": {"num_cpus": 6, "num_gpus": 1}}, 1)]
)
def test_replicas_that_read_prompts_have_pods_and_the_shared_folder(
    prefill: dict[str, Any], more: int, tmp_path: Path
) -> None:
    config = {"engine": {"kv_disk": "/shared/kv", "kv_disk_gib": 50}, "prefill": prefill}
    values = {**RAY_SCALED, "ray": {"version": "2.60.0", "sharedClaim": "many", "config": config}}
    docs = rendered(values)
    (tmp_path / "deploy.yaml").write_text(one(docs, "Secret")["stringData"]["deploy.yaml"], "utf-8")
    deployment = read_deployment(tmp_path / "deploy.yaml")
    assert deployment.prefill is not None and deployment.prefill.replicas == more
    cluster = one(docs, "RayService")["spec"]["rayClusterConfig"]
    [workers] = cluster["workerGroupSpecs"]
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (1 + more, 1 + more, 5 + more)
    for template in (cluster["headGroupSpec"]["template"], workers["template"]):
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **template}, KUBERNETES, strict=True)
        [each] = template["spec"]["containers"]
        [shared] = [mount for mount in each["volumeMounts"] if mount["name"] == "shared"]
        assert shared == {"name": "shared", "mountPath": "/shared"}
        [claim] = [volume for volume in template["spec"]["volumes"] if volume["name"] == "shared"]
        assert claim["persistentVolumeClaim"] == {"claimName": "many"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "ray"}, "needs ray.version"),
        ({**RAY, "autoscaling": {"kind": "hpa"}}, "must be none or ray"),
        ({"autoscaling": {"kind": "ray"}}, "needs kind: ray"),
        ({**RAY, "apiKeys": {"existingSecret": "x"}}, "give apiKeys.keys"),
        ({**RAY, "options": {"max-num-seqs": 3}}, "stand in ray.config"),
        ({**RAY, "networkPolicy": {"enabled": True}}, "networkPolicy is for kind: server"),
        ({**RAY, "serviceMonitor": {"enabled": True}}, "serviceMonitor is for kind: server"),
        ({**RAY, "podDisruptionBudget": {"maxUnavailable": 2}}, "podDisruptionBudget is for kind: server"),
        ({**RAY, "ray": {"version": "2.60.0", "config": {"model": "other"}}}, "ray.config.model is made of"),
        ({**RAY, "ray": {"version": "2.60.0", "config": {"prefill": {}}}}, "needs ray.sharedClaim"),
        *[
            (
                {
                    **RAY,
                    "ray": {"version": "2.60.0", "sharedClaim": "many", "config": {"prefill": {"resources": each}}},
                },
                "prefill.resources must be left out",
            )
            for each in (
                {"num_cpus": 4, "num_gpus": 1},
                {"num_cpus": 6},
                {"num_gpus": 1},
                {"num_cpus": 6, "num_gpus": 1, "threads": 2},
                {},
                {"num_cpus": 0, "num_gpus": 1},
            )
        ],
        (
            {
                **RAY,
                "resources": {"cpu": 1},
                "ray": {
                    "version": "2.60.0",
                    "sharedClaim": "many",
                    "config": {"prefill": {"resources": {"num_cpus": 0}}},
                },
            },
            "prefill.resources must be left out",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        rendered(values)


def test_serve_takes_its_part() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="the extra 'ray' is not installed")
    config = yaml.safe_load(one(rendered(RAY), "RayService")["spec"]["serveConfigV2"])
    checked = schema.ServeDeploySchema(**config)
    assert checked.http_options.host == "0.0.0.0" and [each.name for each in checked.applications] == ["forerun"]
