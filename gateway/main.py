"""`pdserve gateway`: one gateway process."""

from __future__ import annotations

import asyncio
import os
import secrets
from dataclasses import replace

import uvloop

from pdserve.faults import Faults
from pdserve.gateway.process import GatewayProcess
from pdserve.gateway.text.chat_prompt import ChatPrompts
from pdserve.ids import GatewayId
from pdserve.log import setup_logging
from pdserve.models.card import ModelCard
from pdserve.models.generation_config import read_sampling_defaults
from pdserve.models.resolve import home_folder, resolve_model, served_model_name
from pdserve.process import read_faults, say_stage
from pdserve.settings import GatewaySettings, load


def main(argv: list[str]) -> int:
    """Run until SIGTERM; settings from flags, environment and file."""
    settings = load(GatewaySettings, argv, os.environ)
    # Never reused: tokens of a gateway that is gone must not reach its successor.
    gateway_id = GatewayId(f"gateway-{secrets.token_hex(6)}")
    setup_logging(settings.log_level, settings.log_format, process=gateway_id)
    faults = read_faults(os.environ)
    path = resolve_model(settings.model, home_folder(os.environ), say_stage)
    say_stage("loading the tokenizer")
    card = ModelCard.load(
        path,
        served_name=settings.served_model_name or served_model_name(settings.model),
        chat_template=settings.chat_template,
        max_model_len=settings.max_model_len,
    )
    if settings.generation_config == "auto":
        card = replace(card, sampling_defaults=read_sampling_defaults(path))
    prompts = ChatPrompts.load(card.path, card.chat_template)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(settings, gateway_id, card, prompts, faults))
    return 0


async def _run(
    settings: GatewaySettings, gateway_id: GatewayId, card: ModelCard, prompts: ChatPrompts, faults: Faults | None
) -> None:
    await GatewayProcess(settings, gateway_id, card, prompts, faults).run()
