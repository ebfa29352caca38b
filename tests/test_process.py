"""A process ends with a reason when something that it needs has died, and drains when it is told to stop."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from pdserve.bus.bus import Bus
from pdserve.bus.reader import StreamReader
from pdserve.bus.registry import Registry, RegistryView
from pdserve.errors import BusError, ProcessError, SettingError
from pdserve.http_server import HttpServer, listen, url_of
from pdserve.messages import AnyMessage, DecodeJob, Failed, TokenBatch
from pdserve.process import listen_or_explain, read_faults, run_with_background
from pdserve.reasons import FailReason
from pdserve.registration import GatewayRegistration
from pdserve.sampling_params import SamplingParams

FOR_EVER = 3600.0


async def fail(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


async def end() -> None:
    await asyncio.sleep(0)


async def test_work_that_ends_takes_its_background_with_it():
    was_cancelled = False

    async def background() -> None:
        nonlocal was_cancelled
        try:
            await asyncio.sleep(FOR_EVER)
        except asyncio.CancelledError:
            was_cancelled = True
            raise

    await run_with_background(end(), {"it": background()})
    assert was_cancelled


async def test_a_background_task_that_raises_ends_the_process_with_its_reason(caplog):
    with pytest.raises(ProcessError, match=re.escape("the view has died: ValueError('boom')")):
        await run_with_background(asyncio.sleep(FOR_EVER), {"the view": fail(ValueError("boom"))})
    assert "the view has died" in caplog.text
    assert "Traceback" in caplog.text


async def test_an_expected_error_of_the_background_is_told_in_its_own_words(caplog):
    with pytest.raises(ProcessError, match="the view has died: the bus is away"):
        await run_with_background(asyncio.sleep(FOR_EVER), {"the view": fail(BusError("the bus is away"))})
    assert "Traceback" not in caplog.text


async def test_a_background_task_that_just_ends_ends_the_process_too():
    with pytest.raises(ProcessError, match="the view has ended, and this process cannot go on without it"):
        await run_with_background(asyncio.sleep(FOR_EVER), {"the view": end()})


async def test_a_background_task_that_dies_while_the_process_drains_ends_the_drain():
    is_draining = asyncio.Event()

    async def drain() -> None:
        is_draining.set()
        await asyncio.sleep(FOR_EVER)

    async def die() -> None:
        await is_draining.wait()
        raise OSError("gone")

    with pytest.raises(ProcessError, match="the port has died"):
        await run_with_background(drain(), {"the port": die()})


async def test_the_first_error_in_a_task_group_is_the_reason():
    async def group() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(FOR_EVER))
            tasks.create_task(fail(KeyError("inner")))

    with pytest.raises(ProcessError, match=re.escape("the dispatcher has died: KeyError('inner')")):
        await run_with_background(asyncio.sleep(FOR_EVER), {"the dispatcher": group()})


async def test_the_reason_of_an_inner_background_is_told_once():
    inner = run_with_background(asyncio.sleep(FOR_EVER), {"leadership": end()})
    with pytest.raises(ProcessError, match=r"^leadership has ended"):
        await run_with_background(asyncio.sleep(FOR_EVER), {"the operator": inner})


async def test_the_work_itself_fails_with_its_own_error_or_as_a_defect():
    with pytest.raises(SettingError):
        await run_with_background(fail(SettingError("PORT", 1, "another")), {})
    with pytest.raises(ProcessError, match="the main task has died: ZeroDivisionError"):
        await run_with_background(fail(ZeroDivisionError()), {})


async def test_an_http_port_that_dies_ends_the_process():
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # asyncio complains about the socket at once
    sock = listen("127.0.0.1", 0)
    port, server = sock.getsockname()[1], HttpServer(Starlette(), sock)

    async def break_it() -> None:
        async with httpx.AsyncClient() as client:
            assert (await client.get(url_of(sock))).status_code == 404
        sock.shutdown(socket.SHUT_RDWR)
        await asyncio.sleep(FOR_EVER)

    with pytest.raises(ProcessError, match=f"the HTTP port has died: .*port {port} does not listen any more"):
        async with asyncio.timeout(20):
            await run_with_background(break_it(), {"the HTTP port": server.run()})


def test_a_port_that_cannot_be_opened_is_explained_in_one_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingError) as raised:
            listen_or_explain("METRICS_PORT", "127.0.0.1", port)
    assert str(raised.value) == (
        f"setting METRICS_PORT: got {port}, expected a port that is free on 127.0.0.1 (Address already in use)"
    )


SCRIPT = """
import asyncio, sys, time
from pdserve.process import run_with_background, say_stage, stop_on_signals

async def serve(stop):
    await stop.wait()
    say_stage("draining")
    if sys.argv[2] == "hangs":
        time.sleep(60)
    await asyncio.sleep(60 if sys.argv[2] == "waits" else 0)

async def main():
    stop = asyncio.Event()
    stop_on_signals(stop)
    say_stage("serving")
    await run_with_background(serve(stop), {"it": asyncio.sleep(60)})

if sys.argv[1] == "uvloop":
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
"""


@asynccontextmanager
async def running(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A child in Python; killed when the test is over."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(60):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def stage(process: asyncio.subprocess.Process, word: str) -> str:
    """The next stage line with this word."""
    assert process.stdout is not None
    async for raw in process.stdout:
        line = raw.decode()
        if line.startswith("pdserve-stage: ") and word in line:
            return line
    assert process.stderr is not None
    pytest.fail(f"it never said {word!r}: " + (await process.stderr.read()).decode())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_a_signal_drains_and_the_process_ends_well(loop):
    async with running("-c", SCRIPT, loop, "ends") as process:
        await stage(process, "serving")
        process.send_signal(signal.SIGTERM)
        await stage(process, "draining")
        assert await process.wait() == 0


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("how", ["waits", "hangs"])
async def test_a_second_signal_ends_the_process_at_once_even_when_its_loop_hangs(loop, how):
    async with running("-c", SCRIPT, loop, how) as process:
        await stage(process, "serving")
        process.send_signal(signal.SIGTERM)
        await stage(process, "draining")
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
        assert process.returncode == 128 + signal.SIGINT
        assert b"SIGINT: ended at once by a second signal" in errors


WITH_SABOTAGE = """
import os, socket, sys, threading
import psutil
from pdserve.cli import run

def shut_port():
    port = int(sys.stdin.readline())
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status == "LISTEN" and connection.laddr.port == port:
            socket.socket(fileno=os.dup(connection.fd)).shutdown(socket.SHUT_RDWR)

threading.Thread(target=shut_port, daemon=True).start()
sys.exit(run(sys.argv[1], sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("role", "flags"), [("gateway", ["--port=0"]), ("decode", ["--executor=fake", "--num-blocks=64"])]
)
async def test_a_process_whose_port_dies_withdraws_and_ends_with_the_reason(
    role: str, flags: list[str], redis_url: str, tiny_model_dir: Path
) -> None:
    common = [f"--model={tiny_model_dir}", f"--redis-url={redis_url}", "--service=dying", "--heartbeat-s=10"]
    bus = Bus(redis_url, "dying", timeout_s=5)
    async with running("-c", WITH_SABOTAGE, role, *common, *flags) as process:
        url = (await stage(process, " at http://")).split(" at ")[1].split()[0]
        while not await names(bus):  # noqa: ASYNC110  another process registers itself
            await asyncio.sleep(0.05)
        assert process.stdin is not None
        process.stdin.write(f"{url.rsplit(':', 1)[1]}\n".encode())
        _, errors = await process.communicate()
        assert process.returncode == 1
        last = errors.decode().strip().splitlines()[-1]
        assert re.match(rf"pdserve {role}: the (HTTP|API's) port has died: .* does not listen any more", last)
        assert await names(bus) == []
    await bus.close()


async def test_a_worker_whose_port_dies_hands_its_attempts_back_as_restarting(
    redis_url: str, tiny_model_dir: Path
) -> None:
    """A worker that drains of itself is no fault; one with a defect is, and its attempts count against it."""
    flags = [f"--model={tiny_model_dir}", f"--redis-url={redis_url}", "--service=defect", "--executor=fake"]
    bus = Bus(redis_url, "defect", timeout_s=5)
    heard: list[AnyMessage] = []
    await bus.start()
    gateway = GatewayRegistration(gateway_id="gw", generation="g", pid=1, url="", metrics_url="")
    await Registry(bus).announce_gateway(gateway, 600)
    reader = asyncio.create_task(StreamReader(bus, bus.keys.tokens("gw"), heard.append).run())
    async with running("-c", WITH_SABOTAGE, "decode", *flags, "--num-blocks=64", "--fake-itl-s=0.5") as process:
        url = (await stage(process, " at http://")).split(" at ")[1].split()[0]
        while not (found := [each for each in await names(bus) if each != "gw"]):  # noqa: ASYNC110  another process registers itself
            await asyncio.sleep(0.05)
        worker = await Registry(bus).worker(found[0])
        assert worker is not None
        job = DecodeJob(
            request_id="r", choice=0, attempt=1, nonce="n", gateway_id="gw", fingerprint=worker.fingerprint,
            prompt_token_ids=[5, 6, 7], num_original_prompt_tokens=3, remaining_s=60.0,
            sampling=SamplingParams(seed=1, max_tokens=200, temperature=0.0),
        )  # fmt: skip
        bus.send(bus.keys.inbox(*worker.ref), job)
        while not any(isinstance(message, TokenBatch) for message in heard):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert process.stdin is not None
        process.stdin.write(f"{url.rsplit(':', 1)[1]}\n".encode())
        await process.communicate()
        while not (failed := [message for message in heard if isinstance(message, Failed)]):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert [(message.reason, message.retryable) for message in failed] == [(FailReason.RESTARTING, True)]
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    await bus.close()


async def names(bus: Bus) -> list[str]:
    """Who is registered now."""
    view = RegistryView(bus)
    await view.poll()
    return [*view.workers, *view.gateways]


def test_the_delay_of_a_start_is_a_test_hook(monkeypatch):
    assert read_faults({}) is None
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    faults = read_faults({"PDS_FAULTS": '{"start_delay_s": 1.5}'})
    assert (faults is not None, slept) == (True, [1.5])
