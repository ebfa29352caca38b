"""The queue of services: one at a time each, in order of their due times."""

from __future__ import annotations

import asyncio
import time

from pdserve.operator.work_queue import WorkQueue


async def test_a_key_is_never_taken_twice_at_the_same_time() -> None:
    now_s = [0.0]
    queue = WorkQueue(lambda: now_s[0])
    await queue.add(("a", "x"))
    assert await queue.take() == ("a", "x")
    await queue.add(("a", "x"))
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    assert not taking.done()
    await queue.done(("a", "x"))
    assert await asyncio.wait_for(taking, 1) == ("a", "x")


async def test_whoever_waits_for_a_key_can_be_cancelled_at_any_moment() -> None:
    async def work(queue: WorkQueue) -> None:
        while True:
            key = await queue.take()
            await queue.done(key)
            await queue.add(key, 0.001)

    for attempt in range(200):
        queue = WorkQueue(time.monotonic)
        workers = [asyncio.create_task(work(queue)) for _ in range(8)]
        await queue.add(("shop", "chat"))
        await asyncio.sleep(attempt * 1e-5)
        for worker in workers:
            worker.cancel()
        _, left = await asyncio.wait(workers, timeout=5)
        assert not left
        await asyncio.wait_for(queue.add(("shop", "other")), 5)


async def test_the_earlier_time_wins_and_due_keys_come_in_order() -> None:
    queue = WorkQueue(asyncio.get_running_loop().time)
    await queue.add(("a", "late"), 0.2)
    await queue.add(("a", "soon"), 60)
    await queue.add(("a", "soon"), 0.05)
    await queue.add(("a", "soon"), 60)
    assert [await asyncio.wait_for(queue.take(), 1) for _ in range(2)] == [("a", "soon"), ("a", "late")]
