"""Workers are replaced under load: in pairs, without a failed request, whoever kills the operator meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.harness import POLL_S, Json, Load, Namespace, ask, pdservice, wait_for

OPERATOR = "pdserve-system"
PROMPTS = ["the quick brown fox", "one two three four five", "alpha beta gamma delta epsilon zeta"]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def namespace(new_namespace: Callable[[str], Namespace]) -> Iterator[Namespace]:
    """With one service that all tests of this file change, one after the other."""
    made = new_namespace("rollout")
    model = {"source": "tiny", "servedName": "m"}
    made.apply(pdservice("chat", model=model, decode={"min": 2, "max": 4}))
    made.wait_settled("chat")
    yield made
    made.kubectl("delete", "pds", "--all", "--wait=false")
    wait_for(lambda: not made.pods(), 100, "its pods have gone")


def answers_now(namespace: Namespace) -> dict[str, str]:
    (address,) = namespace.endpoints("chat")
    answers = [ask(address, prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert [answer.error for answer in answers] == ["", "", ""]
    return {answer.prompt: answer.text for answer in answers}


def settle_and_watch(namespace: Namespace, timeout_s: float = 240) -> dict[str, int]:
    """The fewest ready workers by role until the rollout is complete."""
    fewest = {"prefill": 99, "decode": 99}
    give_up_s = time.monotonic() + timeout_s
    while not namespace.is_settled("chat"):
        assert time.monotonic() < give_up_s, namespace.explain("chat")
        fewest = {role: min(least, len(namespace.ready_pods(role))) for role, least in fewest.items()}
        time.sleep(POLL_S)
    return fewest


def test_another_model_under_load_fails_no_request_and_mixes_no_pair(
    namespace: Namespace, other_model: Path, record_property: Callable[[str, object], None]
) -> None:
    before = answers_now(namespace)
    assert len(set(before.values())) == len(PROMPTS)
    with Load(namespace, "chat", 3, NUM_TOKENS, PROMPTS) as load:
        namespace.patch("chat", {"model": {"source": str(other_model)}})
        wait_for(lambda: len(namespace.pods("decode")) > 2, 60, "a new decode pod stands beside the old ones")
        kill_the_operator(namespace)
        fewest = settle_and_watch(namespace)
    after = answers_now(namespace)
    assert load.failures == []
    assert fewest["prefill"] >= 1
    assert fewest["decode"] >= 2
    # Greedy answers of either model, and of nothing in between: no KV of one was ever read by the other.
    assert [a for a in load.answers if a.text not in (before[a.prompt], after[a.prompt])] == []
    assert set(before.values()) & set(after.values()) == set()
    record_property("headline", f"another model under load: 0 of {len(load.answers)} requests failed")


def kill_the_operator(namespace: Namespace) -> None:
    namespace.cluster.kubectl(
        "-n", OPERATOR, "delete", "pod", "-l", "app.kubernetes.io/name=pdserve-operator", "--grace-period=0",
        "--force", "--wait=false",
    )  # fmt: skip


def test_three_rapid_edits_end_in_the_last_one(namespace: Namespace) -> None:
    for block_size in (32, 8, 64):
        engine = {"engine": {"blockSize": block_size}}
        namespace.patch("chat", {"prefill": engine, "decode": engine})
        time.sleep(1)
    fewest = settle_and_watch(namespace)
    assert fewest["decode"] >= 2
    assert fewest["prefill"] >= 1
    assert {settings(namespace, pod)["PDS_BLOCK_SIZE"] for pod in workers(namespace)} == {"64"}
    maps = namespace.kubectl("get", "cm", "-l", "app.kubernetes.io/managed-by=pdserve-operator", "-o", "name").split()
    assert len(maps) == 3, "ConfigMaps of older templates are gone"


def test_without_room_for_a_surge_it_says_so_and_goes_on_when_there_is(namespace: Namespace) -> None:
    before = answers_now(namespace)
    engine = {"engine": {"blockSize": 16}}
    namespace.patch("chat", {"budget": {"pods": 3}, "prefill": engine, "decode": engine})
    condition = namespace.wait_reason("chat", "Progressing", "NoRoomToSurge")
    assert condition["status"] == "False"
    assert "allowDowntime" in condition["message"]
    assert answers_now(namespace) == before
    assert len(namespace.pods("decode")) + len(namespace.pods("prefill")) == 3
    assert "NoRoomToSurge" in namespace.events("chat")
    namespace.kubectl("patch", "pds", "chat", "--type=json", "-p", '[{"op": "remove", "path": "/spec/budget"}]')
    settle_and_watch(namespace)
    assert {settings(namespace, pod)["PDS_BLOCK_SIZE"] for pod in workers(namespace)} == {"16"}


def workers(namespace: Namespace) -> list[Json]:
    pods = namespace.pods("prefill") + namespace.pods("decode")
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def settings(namespace: Namespace, pod: Json) -> dict[str, str]:
    name = pod["spec"]["containers"][0]["envFrom"][0]["configMapRef"]["name"]
    return dict(namespace.cluster.get(f"/api/v1/namespaces/{namespace.name}/configmaps/{name}")["data"])


@pytest.mark.slow
def test_a_surge_that_no_node_takes_gives_way_after_a_minute(new_namespace: Callable[[str], Namespace]) -> None:
    crowded = new_namespace("crowded")
    pool = {"min": 2, "max": 2, "resources": {"requests": {"cpu": "14"}}}  # of the node's 64: a fifth one does not fit
    crowded.apply(pdservice("chat", prefill=pool, decode=pool))
    crowded.wait_settled("chat")
    engine = {"engine": {"blockSize": 32}}
    crowded.patch("chat", {"prefill": engine, "decode": engine})
    crowded.wait_reason("chat", "Degraded", "Unschedulable")
    fewest = settle_and_watch(crowded)
    assert (fewest["prefill"], fewest["decode"]) == (1, 1)
    assert {settings(crowded, pod)["PDS_BLOCK_SIZE"] for pod in workers(crowded)} == {"32"}
    crowded.kubectl("delete", "pds", "chat", "--wait=false")
