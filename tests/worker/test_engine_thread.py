"""The engine's thread between two steps: how long it rests, and that commands reach it meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest

from pdserve.engine.engine import Engine, StepOutput
from pdserve.engine.executors.fake import FakeExecutor, FakeOptions
from pdserve.engine.kv.block_tables import BlockTables
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.messages import AttemptKey
from pdserve.sampling_params import SamplingParams
from pdserve.worker.engine_thread import EngineThread, StepFailure


class Heard:
    """When each step's output arrived."""

    def __init__(self) -> None:
        self.steps_s: list[float] = []

    def on_admitted(self, sequence: Sequence) -> None:
        """Not of interest."""

    def on_step(self, output: StepOutput) -> None:
        self.steps_s.append(time.monotonic())

    def on_step_failed(self, failure: StepFailure) -> None:
        raise AssertionError(failure)


def make_engine() -> Engine:
    executor = FakeExecutor(
        FakeOptions(), vocab_size=100, eos_token_ids=frozenset({1}), block_size=4, max_model_len=512
    )
    tables = BlockTables(64, executor.kv_spec.block_size, is_cache_on=True, cache_key=b"test")
    scheduler = Scheduler(tables, max_num_seqs=4, max_num_batched_tokens=64, max_wait_s=10.0, watermark_blocks=1)
    return Engine(executor, scheduler, eos_token_ids=frozenset({1}), clock=time.monotonic)


def a_sequence(name: str, max_tokens: int) -> Sequence:
    sampling = SamplingParams(seed=0, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Sequence(AttemptKey(name, 0, 0, "nonce"), [5, 6, 7], 3, sampling)


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[Engine, EngineThread, Heard]]]:
    threads = []

    def started(interval_s: Callable[[], float]) -> tuple[Engine, EngineThread, Heard]:
        engine, heard = make_engine(), Heard()
        thread = EngineThread(engine)
        thread.space_steps(interval_s)
        thread.start(asyncio.get_running_loop(), heard)
        threads.append(thread)
        return engine, thread, heard

    yield started
    for thread in threads:
        thread.stop(5.0)


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {timeout_s} s"
        await asyncio.sleep(0.005)


async def test_steps_begin_at_least_the_interval_apart(
    start: Callable[..., tuple[Engine, EngineThread, Heard]],
) -> None:
    engine, thread, heard = start(lambda: 0.1)
    began_s = time.monotonic()
    await thread.call(lambda engine: engine.add(a_sequence("a", 5)))
    await until(lambda: len(heard.steps_s) == 5)
    assert heard.steps_s[-1] - began_s >= 4 * 0.1
    assert not engine.has_work


async def test_a_rest_ends_at_once_when_its_reason_ends_and_commands_run_during_it(
    start: Callable[..., tuple[Engine, EngineThread, Heard]],
) -> None:
    interval_s = [60.0]
    engine, thread, heard = start(lambda: interval_s[0])
    await thread.call(lambda engine: engine.add(a_sequence("a", 3)))
    await until(lambda: len(heard.steps_s) == 1)
    assert await asyncio.wait_for(thread.call(lambda engine: len(engine.scheduler.running)), 5) == 1
    await thread.call(lambda engine: engine.add(a_sequence("b", 2)))
    assert len(heard.steps_s) == 1, "it did not rest"
    await thread.call(lambda engine: interval_s.__setitem__(0, 0.0))
    await until(lambda: not engine.has_work)


async def test_stopping_does_not_wait_for_the_end_of_a_rest(
    start: Callable[..., tuple[Engine, EngineThread, Heard]],
) -> None:
    _, thread, heard = start(lambda: 60.0)
    await thread.call(lambda engine: engine.add(a_sequence("a", 3)))
    await until(lambda: len(heard.steps_s) == 1)
    began_s = time.monotonic()
    await asyncio.to_thread(thread.stop, 30.0)
    assert time.monotonic() - began_s < 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_the_end_of_the_thread_is_noticed(start: Callable[..., tuple[Engine, EngineThread, Heard]]) -> None:
    _, thread, _ = start(lambda: 0.0)
    waiting = asyncio.create_task(thread.wait_for_end())
    await thread.call(lambda engine: None)
    assert not waiting.done()

    def die(engine: Engine) -> None:
        raise SystemExit  # no Exception, so that nothing in the thread catches it

    thread.post(die)
    async with asyncio.timeout(10):
        await waiting
