"""Pools shrink without cutting a stream, and the one with the least in hand goes."""

from __future__ import annotations

import threading

import httpx

from cluster.harness import Answer, Json, Namespace, ask, pdservice, wait_for

NUM_TOKENS = 150
ITL_S = 0.1


def slow_service() -> Json:
    """Streams of 15 s, so that there is time to look."""
    env = [{"name": "PDS_FAKE_ITL_S", "value": str(ITL_S)}]
    pool = {
        "engine": {"executor": "fake", "numBlocks": 256, "threads": 1},
        "podTemplate": {"spec": {"containers": [{"name": "", "env": env}]}},
    }
    return pdservice("chat", prefill=named(pool, "prefill"), decode=named(pool, "decode") | {"min": 3, "max": 3})


def named(pool: Json, container: str) -> Json:
    overlay = {"spec": {"containers": [pool["podTemplate"]["spec"]["containers"][0] | {"name": container}]}}
    return pool | {"podTemplate": overlay}


def test_the_idle_worker_goes_and_no_stream_is_cut(namespace: Namespace) -> None:
    namespace.apply(slow_service())
    namespace.wait_settled("chat")
    (address,) = namespace.endpoints("chat")
    answers: list[Answer] = []
    prompts = ["first stream", "second stream"]
    threads = [
        threading.Thread(target=lambda p=prompt: answers.append(ask(address, p, NUM_TOKENS))) for prompt in prompts
    ]
    for thread in threads:
        thread.start()
    busy = wait_for(lambda: busy_pods(namespace, 2), 20, "both streams decode")
    idle = {pod["metadata"]["name"] for pod in namespace.ready_pods("decode")} - busy
    assert len(idle) == 1, f"two streams on {busy}"

    namespace.patch("chat", {"decode": {"min": 2, "max": 3}})
    wait_for(lambda: namespace.deployment("chat-decode")["spec"]["replicas"] == 2, 20, "the operator lowers the number")
    wait_for(lambda: len(namespace.pods("decode")) == 2, 60, "one pod has gone")
    assert {pod["metadata"]["name"] for pod in namespace.pods("decode")} == busy

    # Both that are left are busy: the victim finishes what it has.
    namespace.patch("chat", {"decode": {"min": 1, "max": 3}})
    for thread in threads:
        thread.join()
    assert [(answer.error, answer.is_finished) for answer in answers] == [("", True)] * 2
    wait_for(lambda: len(namespace.pods("decode")) == 1, 60, "one pod is left")
    namespace.wait_settled("chat")
    wait_for(lambda: held_blocks(namespace) == 0, 20, "every KV block is given back")
    decisions = namespace.service("chat")["status"]["decisions"]
    assert [(d["pool"], d["from"], d["to"]) for d in decisions] == [("decode", 2, 1), ("decode", 3, 2)]
    assert namespace.events("chat").count("Scaled") == 2


def busy_pods(namespace: Namespace, num: int) -> set[str] | None:
    loads = {pod["metadata"]["name"]: metric(pod, "pd_num_requests_running") for pod in namespace.ready_pods("decode")}
    busy = {name for name, load in loads.items() if load > 0}
    return busy if sum(loads.values()) >= num else None


def metric(pod: Json, name: str) -> float:
    text = httpx.get(f"http://{pod['status']['podIP']}:9100/metrics", timeout=10, trust_env=False).text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


def held_blocks(namespace: Namespace) -> int:
    total = 0
    for pod in namespace.ready_pods("decode") + namespace.ready_pods("prefill"):
        ledger = httpx.get(f"http://{pod['status']['podIP']}:9100/debug/kv", timeout=10, trust_env=False).json()
        assert ledger["ok"] is True
        total += sum(count for state, count in ledger["by_state"].items() if state not in ("free", "cached"))
    return total


def test_somebody_elses_number_of_replicas_is_left_alone(namespace: Namespace) -> None:
    namespace.apply(idle_service("chat", scaling={"mode": "Off"}))
    wait_for(lambda: namespace.deployment("chat-decode"), 20, "the Deployment exists")
    namespace.kubectl("scale", "deployment/chat-decode", "--replicas=3")
    namespace.patch("chat", {"decode": {"startSeconds": 800}})
    wait_for(lambda: start_threshold(namespace) == 400, 20, "the template has changed")
    deployment = namespace.deployment("chat-decode") or {}
    assert deployment["spec"]["replicas"] == 3


def test_a_number_changed_by_hand_is_corrected_and_told(namespace: Namespace) -> None:
    namespace.apply(idle_service("chat"))
    wait_for(lambda: namespace.deployment("chat-decode"), 20, "the Deployment exists")
    namespace.kubectl("scale", "deployment/chat-decode", "--replicas=3")
    wait_for(lambda: namespace.deployment("chat-decode")["spec"]["replicas"] == 1, 30, "the number is corrected")
    wait_for(lambda: "Scaled" in namespace.events("chat"), 10, "an event says so")


def start_threshold(namespace: Namespace) -> int:
    deployment = namespace.deployment("chat-decode") or {}
    return int(deployment["spec"]["template"]["spec"]["containers"][0]["startupProbe"]["failureThreshold"])


def idle_service(name: str, **spec: object) -> Json:
    """Objects without processes: no node takes its pods."""
    nowhere = {"nodeSelector": {"nowhere": "true"}}
    overlay = {"podTemplate": {"spec": nowhere}}
    made = pdservice(name, gateway=overlay, prefill=nowhere, decode=nowhere, **spec)
    made["spec"]["redis"] = {"urls": ["redis://redis.example:6379/0"]}
    return made
