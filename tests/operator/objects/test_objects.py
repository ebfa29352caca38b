"""What a spec becomes: every object, its names, and what must hold of each pod."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from pdserve.commands.render import main as render
from pdserve.operator.api.policy import read_policy
from pdserve.operator.api.spec import SpecError, read_service
from pdserve.operator.facts import ClusterFacts, Owner
from pdserve.operator.objects.overlay import apply_overlay
from pdserve.operator.objects.plan import applied_digest, plan_of
from pdserve.settings import DecodeSettings, GatewaySettings, PrefillSettings, load

Json = dict[str, Any]
OWNER = Owner("chat", "shop", "uid-1")
CLASSES = {"gateway": GatewaySettings, "prefill": PrefillSettings, "decode": DecodeSettings}


def plan(facts: ClusterFacts | None = None, **spec: Any) -> Any:
    service = {"metadata": {"name": "chat"}, "spec": {"model": {"source": "demo"}} | spec}
    return plan_of(read_service(service), OWNER, facts or ClusterFacts())


def pods(made: Any) -> dict[str, Json]:
    deployments = {"gateway": made.gateway, **made.pools}
    return {role: item["spec"]["template"]["spec"] for role, item in deployments.items()}


def env_of(made: Any, role: str) -> dict[str, str]:
    """What the container's process sees, with downward values filled in."""
    container = pods(made)[role]["containers"][0]
    name = container["envFrom"][0]["configMapRef"]["name"]
    settings = next(item["data"] for item in made.others if item["metadata"]["name"] == name)
    env = dict(settings)
    for variable in container["env"]:
        value = variable.get("value", "from-the-cluster")
        env[variable["name"]] = re.sub(r"\$\(\w+\)", "secret", value)
    return env


@pytest.mark.parametrize("role", ["gateway", "prefill", "decode"])
def test_every_process_accepts_its_settings(role: str) -> None:
    made = plan(
        model={"source": "hf://Qwen/Qwen3-8B", "revision": "main", "maxModelLen": 4096, "servedName": "q"},
        prefill={"engine": {"kvMemoryFraction": 0.5, "threads": 2}},
    )
    settings: Any = load(CLASSES[role], [], env_of(made, role))
    assert settings.service == "shop.chat"
    assert settings.model == "hf://Qwen/Qwen3-8B@main"
    assert settings.redis_url == "redis://:secret@chat-redis:6379/0"
    assert settings.metrics_port == 9100


def test_who_computes_prompts_reaches_the_gateway_and_the_decode_workers() -> None:
    made = plan(disaggregation={"mode": "Never"})
    gateway: Any = load(GatewaySettings, [], env_of(made, "gateway"))
    assert (gateway.disaggregation, gateway.min_remote_tokens, gateway.local_prefill) == ("never", 0, "auto")
    made = plan(disaggregation={"minRemoteTokens": 48}, failure={"localPrefill": "Never"})
    gateway = load(GatewaySettings, [], env_of(made, "gateway"))
    decode: Any = load(DecodeSettings, [], env_of(made, "decode"))
    assert (gateway.disaggregation, gateway.min_remote_tokens) == ("auto", 48)
    assert gateway.local_prefill == decode.local_prefill == "never"


def test_all_processes_count_on_the_same_lease() -> None:
    made = plan(transfer={"lease": "3s"})
    leases = {role: load(CLASSES[role], [], env_of(made, role)).kv_lease_s for role in CLASSES}  # type: ignore[attr-defined]
    assert leases == {"gateway": 3.0, "prefill": 3.0, "decode": 3.0}


def test_children_have_the_names_that_outsiders_rely_on() -> None:
    made = plan()
    names = {(item["kind"], item["metadata"]["name"]) for item in [*made.others, made.gateway, *made.pools.values()]}
    assert {("Deployment", f"chat-{role}") for role in ("gateway", "prefill", "decode", "redis")} <= names
    assert {("Service", "chat"), ("Service", "chat-redis"), ("ServiceAccount", "chat")} <= names
    for item in made.pools.values():
        labels = item["spec"]["template"]["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "pdserve"
        assert labels["app.kubernetes.io/instance"] == "chat"
        assert labels["pdserve.dev/role"] in ("prefill", "decode")


@pytest.mark.parametrize("role", ["gateway", "prefill", "decode"])
def test_pods_are_restricted_probed_and_drained(role: str) -> None:
    pod = pods(plan(prefill={"drainSeconds": 50}, decode={"drainSeconds": 50}, gateway={"drainSeconds": 50}))[role]
    (container,) = pod["containers"]
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["command"] == ["pdserve", role], "exec form: SIGTERM reaches the process itself"
    assert {"startupProbe", "readinessProbe", "livenessProbe", "lifecycle"} <= container.keys()
    stop_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > stop_s + 50
    assert [port["containerPort"] for port in container["ports"] if port["name"] == "metrics"] == [9100]


def test_the_startup_probe_allows_for_the_models_load() -> None:
    (container,) = pods(plan(decode={"startSeconds": 1200}))["decode"]["containers"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 1200


def test_pools_roll_with_a_surge_and_leave_replicas_to_the_scaler() -> None:
    for item in plan().pools.values():
        assert "replicas" not in item["spec"]
        assert item["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_accelerators_and_rdma_are_asked_for_and_rdma_alone_brings_nixl() -> None:
    gpu = {"accelerator": {}, "rdma": {"resource": "rdma/hca"}}
    with_rdma = plan(prefill=gpu, decode=gpu)
    container = pods(with_rdma)["decode"]["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1", "rdma/hca": "1"}
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert env_of(with_rdma, "decode")["PDS_TRANSPORT"] == "auto"
    assert env_of(with_rdma, "decode")["UCX_TCP_PORT_RANGE"] == "18501-18515"
    assert env_of(plan(prefill={"accelerator": {}}, decode={"accelerator": {}}), "decode")["PDS_TRANSPORT"] == "tcp"


def test_an_external_redis_keeps_its_password_in_its_secret() -> None:
    redis = {"urls": ["rediss://redis.example:6380/0"], "authSecretRef": {"name": "redis", "key": "pw"}}
    made = plan(redis=redis)
    assert not made.has_managed_redis
    assert "chat-redis" not in {item["metadata"]["name"] for item in made.others}
    env = {variable["name"]: variable for variable in pods(made)["gateway"]["containers"][0]["env"]}
    assert env["PDS_REDIS_URL"]["value"] == "rediss://:$(REDIS_PASSWORD)@redis.example:6380/0"
    assert env["REDIS_PASSWORD"]["valueFrom"]["secretKeyRef"] == {"name": "redis", "key": "pw"}


def test_a_claim_is_a_source_and_a_cache() -> None:
    made = plan(model={"source": "pvc://models/qwen/8b", "cache": {"pvc": "cache"}})
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in pods(made)["decode"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims == {"model": "models", "cache": "cache"}
    assert env_of(made, "decode")["PDS_MODEL"] == "/var/cache/models/qwen/8b"


def test_network_policies_open_the_transfer_ports_between_the_pools_alone() -> None:
    policies = {item["metadata"]["name"]: item["spec"] for item in plan().others if item["kind"] == "NetworkPolicy"}
    (metrics, transfer) = policies["chat-prefill"]["ingress"]
    assert [port["port"] for port in transfer["ports"]] == list(range(18500, 18516))
    (peer,) = transfer["from"]
    assert peer["podSelector"]["matchLabels"]["pdserve.dev/role"] == "decode"
    assert [port["port"] for port in metrics["ports"]] == [9100]
    assert set(policies) == {"chat-gateway", "chat-prefill", "chat-decode", "chat-redis"}


def test_monitoring_objects_exist_where_their_kinds_do() -> None:
    kinds = {item["kind"] for item in plan().others}
    assert not {"PodMonitor", "PrometheusRule"} & kinds
    facts = ClusterFacts(has_pod_monitors=True, has_prometheus_rules=True)
    made = plan(facts)
    assert {"PodMonitor", "PrometheusRule"} <= {item["kind"] for item in made.others}
    (board,) = [item for item in made.others if item["metadata"]["name"] == "chat-dashboard"]
    assert json.loads(next(iter(board["data"].values())))["panels"]
    assert not {"PodMonitor"} & {item["kind"] for item in plan(facts, observability={"podMonitor": False}).others}


def test_equal_specs_give_equal_digests_and_a_change_gives_another_template() -> None:
    assert [applied_digest(item) for item in plan().others] == [applied_digest(item) for item in plan().others]
    before, after = plan(), plan(model={"source": "tiny"})
    for role in ("prefill", "decode"):
        assert before.pools[role]["spec"]["template"] != after.pools[role]["spec"]["template"]
    assert before.signature != after.signature


def test_what_does_not_touch_kv_keeps_the_signature() -> None:
    assert plan().signature == plan(decode={"engine": {"maxSequences": 8}}).signature
    blocks = {"engine": {"blockSize": 32}}
    assert plan().signature != plan(prefill=blocks, decode=blocks).signature


def test_pools_of_different_signatures_are_refused() -> None:
    with pytest.raises(SpecError, match=r"engine\.blockSize"):
        plan(decode={"engine": {"blockSize": 32}})


def test_scale_to_zero_lets_gateways_hold_requests() -> None:
    empty = {"min": 0}
    spec = read_service(
        {"metadata": {"name": "chat"}, "spec": {"model": {"source": "demo"}, "prefill": empty, "decode": empty}}
    )
    policy = read_policy({"scaleToZero": {"holdRequests": 50, "holdTimeout": "90s"}})
    env = env_of(plan_of(spec, OWNER, ClusterFacts(), policy), "gateway")
    assert (env["PDS_HOLD_REQUESTS"], env["PDS_HOLD_TIMEOUT_S"]) == ("50", "90")
    by_default = env_of(plan_of(spec, OWNER, ClusterFacts()), "gateway")
    assert (by_default["PDS_HOLD_REQUESTS"], by_default["PDS_HOLD_TIMEOUT_S"]) == ("100", "120")
    assert "PDS_HOLD_REQUESTS" not in env_of(plan(), "gateway")


def test_an_overlay_merges_lists_by_name_and_null_removes() -> None:
    base = {
        "containers": [{"name": "a", "env": [{"name": "X", "value": "1"}], "image": "i"}],
        "tolerations": [{"key": "k"}],
        "nodeSelector": {"x": "y"},
    }
    overlay = {
        "containers": [{"name": "a", "env": [{"name": "Y", "value": "2"}]}, {"name": "b", "image": "j"}],
        "tolerations": [{"key": "l"}],
        "nodeSelector": None,
    }
    assert apply_overlay(base, overlay) == {
        "containers": [
            {"name": "a", "image": "i", "env": [{"name": "X", "value": "1"}, {"name": "Y", "value": "2"}]},
            {"name": "b", "image": "j"},
        ],
        "tolerations": [{"key": "k"}, {"key": "l"}],
    }
    assert base["nodeSelector"] == {"x": "y"}, "the base is not touched"


def test_an_overlay_can_not_take_a_pod_out_of_its_selector() -> None:
    made = plan(decode={"podTemplate": {"metadata": {"labels": {"pdserve.dev/role": "other", "team": "x"}}}})
    labels = made.pools["decode"]["spec"]["template"]["metadata"]["labels"]
    assert (labels["pdserve.dev/role"], labels["team"]) == ("decode", "x")


def test_render_prints_everything_as_yaml(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(
        "apiVersion: pdserve.dev/v1alpha1\nkind: PDService\nmetadata: {name: x}\nspec: {model: {source: demo}}"
    )
    assert render([str(file), "--namespace", "shop", "--image", "registry/pdserve:1"]) == 0
    items = list(yaml.safe_load_all(capsys.readouterr().out))
    assert {item["metadata"]["namespace"] for item in items} == {"shop"}
    images = {
        c["image"] for i in items if i["kind"] == "Deployment" for c in i["spec"]["template"]["spec"]["containers"]
    }
    assert images == {"registry/pdserve:1"}
    assert {item["metadata"]["name"] for item in items if item["kind"] == "Deployment"} == {
        "x-gateway", "x-prefill", "x-decode", "x-redis"
    }  # fmt: skip


def test_render_says_what_is_wrong_with_a_file(tmp_path: Any) -> None:
    file = tmp_path / "other.yaml"
    file.write_text("kind: Pod")
    with pytest.raises(SpecError, match="no object of kind PDService"):
        render([str(file)])
