"""What goes wrong has a reason of its own, a sentence that says what to do, and costs nothing that runs."""

from __future__ import annotations

import pytest
import yaml

from cluster.harness import Namespace, ask, pdservice, wait_for


def test_every_failure_has_its_reason_and_the_last_good_state_keeps_serving(namespace: Namespace) -> None:
    token = {"authSecretRef": {"name": "hub", "key": "token"}}
    namespace.apply(pdservice("chat", model={"source": "tiny", "servedName": "m"} | token))
    missing = namespace.wait_reason("chat", "Degraded", "MissingSecret")
    assert '"hub"' in missing["message"]
    assert namespace.condition("chat", "Ready")["reason"] == "MissingSecret"
    namespace.kubectl("create", "secret", "generic", "hub", "--from-literal=token=x")
    namespace.wait_settled("chat")

    namespace.patch("chat", {"model": {"source": "/nowhere/at/all"}})
    crashing = namespace.wait_reason("chat", "Degraded", "CrashLooping")
    assert "there is no model '/nowhere/at/all'" in crashing["message"]
    assert_serves(namespace)
    namespace.patch("chat", {"model": {"source": "tiny"}})
    namespace.wait_settled("chat")

    namespace.patch("chat", {"decode": {"nodeSelector": {"nowhere": "true"}}})
    unschedulable = namespace.wait_reason("chat", "Degraded", "Unschedulable")
    assert "nodes are available" in unschedulable["message"]
    assert_serves(namespace)
    namespace.kubectl(
        "patch", "pds", "chat", "--type=json", "-p", '[{"op": "remove", "path": "/spec/decode/nodeSelector"}]'
    )
    namespace.wait_settled("chat")

    namespace.patch("chat", {"prefill": {"min": 5, "max": 2}})
    invalid = namespace.wait_reason("chat", "Degraded", "InvalidSpec")
    assert "min must not be greater than max" in invalid["message"]
    assert "last good state keeps running" in invalid["message"]
    assert_serves(namespace)
    namespace.patch("chat", {"prefill": {"min": 1, "max": 2}})
    namespace.wait_settled("chat")

    namespace.kubectl("scale", "deployment/chat-redis", "--replicas=0")
    down = namespace.wait_reason("chat", "Degraded", "RedisUnavailable")
    assert down["message"].startswith(("prefill: ", "decode: ")), "in the words of the worker itself"
    namespace.kubectl("scale", "deployment/chat-redis", "--replicas=1")
    namespace.wait_settled("chat")
    assert_serves(namespace)


def assert_serves(namespace: Namespace) -> None:
    (address,) = namespace.endpoints("chat")
    answer = ask(address, "still there", 4)
    assert (answer.error, answer.is_finished) == ("", True)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"model": {"source": "ftp://x"}}, "spec.model.source"),
        ({"slo": {"ttft": "soon"}}, "spec.slo.ttft"),
        ({"prefill": {"accelerator": {"count": 2}}}, "spec.prefill.accelerator.count"),
        ({"scaling": {"mode": "Sometimes"}}, "Unsupported value"),
        ({"redis": {"urls": ["redis://:secret@host"]}}, "spec.redis.urls"),
    ],
)
def test_the_schema_refuses_what_it_can(namespace: Namespace, spec: dict[str, object], sentence: str) -> None:
    said = namespace.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(pdservice("chat", **spec)), check=False)
    assert "invalid" in said
    assert sentence in said


def test_pools_that_could_never_exchange_blocks_are_refused(namespace: Namespace) -> None:
    namespace.apply(pdservice("chat", decode={"engine": {"blockSize": 32}}))
    condition = namespace.wait_reason("chat", "Degraded", "InvalidSpec")
    assert "engine.blockSize" in condition["message"]
    assert namespace.kubectl("get", "deploy", "-o", "name").strip() in ("", "No resources found in " + namespace.name)


def test_a_quota_is_no_crash(namespace: Namespace) -> None:
    namespace.kubectl("create", "quota", "none", "--hard=pods=0")
    namespace.apply(pdservice("chat"))
    condition = namespace.wait_reason("chat", "Degraded", "CannotCreatePods")
    assert "quota" in condition["message"]
    wait_for(lambda: "CannotCreatePods" in namespace.events("chat"), 10, "an event says so")
