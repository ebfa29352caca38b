"""Hand-offs between a prefill and a decode worker in one process: the good way, cancels, lost messages, failures."""

from __future__ import annotations

import pytest
from one_process import tokens_of, world
from virtual_time import in_virtual_time, until


@pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 16, 40, 63])
@in_virtual_time
async def test_a_hand_off_gives_the_tokens_of_one_engine_alone(num_prompt_tokens: int) -> None:
    async with world() as w:
        p, d = await w.pair()
        sequence = w.gateway.sequence(num_prompt_tokens, max_tokens=9)
        sequence.prefill(p)
        await until(lambda: sequence.has_started)
        sequence.decode(d, p)
        await until(lambda: sequence.is_finished)
        assert sequence.token_ids == tokens_of(sequence.prompt, 9)
        assert d.transports.num_reads > 0
