"""The Lease: one operator acts, and another one takes over."""

from __future__ import annotations

import asyncio

import pytest
from api_server import running

from pdserve.operator.cluster.kube import path_of
from pdserve.operator.leader import Leadership


async def test_one_of_two_holds_the_lease_and_the_other_takes_over() -> None:
    async with running() as (_, kube):
        first, second = (Leadership(kube, "shop", name, 0.4) for name in ("first", "second"))
        await first.acquire()
        waiting = asyncio.create_task(second.acquire())
        keeping = asyncio.create_task(first.keep())
        await asyncio.sleep(1.0)
        assert not waiting.done(), "a renewed Lease is not free"
        keeping.cancel()
        await asyncio.wait_for(waiting, 5)
        with pytest.raises(asyncio.CancelledError):
            await keeping


async def test_a_released_lease_is_free_at_once() -> None:
    async with running() as (_, kube):
        first, second = (Leadership(kube, "shop", name, 60.0) for name in ("first", "second"))
        await first.acquire()
        await first.release()
        await asyncio.wait_for(second.acquire(), 1)


async def test_who_lost_the_lease_stops() -> None:
    async with running() as (server, kube):
        first = Leadership(kube, "shop", "first", 0.3)
        await first.acquire()
        path = path_of("coordination.k8s.io/v1", "Lease", "shop", "pdserve-operator")
        server.objects[path]["spec"]["holderIdentity"] = "thief"
        await asyncio.wait_for(first.keep(), 5)


async def test_a_lease_that_can_not_be_renewed_is_given_up_before_another_may_take_it() -> None:
    async with running() as (server, kube):
        first = Leadership(kube, "shop", "first", 0.6)
        await first.acquire()
        server.answers = [(403, {})] * 100
        began_s = asyncio.get_running_loop().time()
        await asyncio.wait_for(first.keep(), 5)
        assert asyncio.get_running_loop().time() - began_s < 1.2


async def test_a_lease_is_given_up_in_time_when_the_server_hangs() -> None:
    async with running() as (server, kube):
        first = Leadership(kube, "shop", "first", 0.6)
        await first.acquire()
        server.hangs_s = 3.0
        began_s = asyncio.get_running_loop().time()
        await asyncio.wait_for(first.keep(), 5)
        assert asyncio.get_running_loop().time() - began_s < 1.5
        server.hangs_s = 0.0
