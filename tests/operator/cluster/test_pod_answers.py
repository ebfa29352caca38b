"""What pods answer at /ready, over HTTP: readiness in fields, words of another version, silence."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from pdserve.operator.cluster.pod_answers import PodAnswers
from pdserve.operator.names import METRICS_PORT
from pdserve.operator.status.pods_seen import PodSeen
from pdserve.readiness import ReadyLoad, ReadyReason

FIELDS = {"ready": False, "reason": "no_workers", "message": "Start a worker.", "load": {"num_waiting": 3}}
ANSWERS = {
    "127.77.0.1": FIELDS | {"error": {"message": "Start a worker.", "type": "unavailable"}},
    "127.77.0.2": "the bus does not answer",
    "127.77.0.3": FIELDS | {"reason": "of a newer version"},
}
SILENT = "127.77.0.4"


@pytest.fixture
async def answers() -> AsyncIterator[PodAnswers]:
    """Pods with addresses of this machine, which answer as above."""

    async def ready(request: web.Request) -> web.Response:
        said = ANSWERS[request.host.split(":")[0]]
        return web.json_response(said, status=503) if isinstance(said, dict) else web.Response(text=said, status=503)

    app = web.Application()
    app.router.add_get("/ready", ready)
    runner = web.AppRunner(app)
    await runner.setup()
    for address in ANSWERS:
        await web.TCPSite(runner, address, METRICS_PORT).start()
    asking = PodAnswers()
    yield asking
    await asking.close()
    await runner.cleanup()


def pod(ip: str, *, is_ready: bool = False, role: str = "gateway") -> PodSeen:
    return PodSeen(ip or "no address", role, "t", "s", False, is_ready, True, None, None, ip, 0.0)


async def test_the_fields_are_read_beside_the_error_of_a_gateway(answers: PodAnswers) -> None:
    found = (await answers.why_not_ready([pod("127.77.0.1")]))["127.77.0.1"]
    assert (found.reason, found.message) == (ReadyReason.NO_WORKERS, "Start a worker.")
    assert found.load == ReadyLoad(num_waiting=3)


async def test_words_of_another_version_are_of_unknown_reason_and_silence_is_left_out(answers: PodAnswers) -> None:
    found = await answers.readiness([pod(ip) for ip in (*ANSWERS, SILENT, "")])
    assert {ip: answer.reason.value for ip, answer in found.items()} == {
        "127.77.0.1": "no_workers",
        "127.77.0.2": "unknown",
        "127.77.0.3": "unknown",
    }


async def test_pods_that_are_ready_and_redis_are_not_asked_why_they_are_not(answers: PodAnswers) -> None:
    assert await answers.why_not_ready([pod("127.77.0.1", is_ready=True), pod("127.77.0.1", role="redis")]) == {}
