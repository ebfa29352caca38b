"""The settings of workers: those of both roles in a common base, and what only one role has."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.settings.field import setting
from pdserve.settings.kinds import (
    boolean,
    choice,
    integer,
    name,
    optional,
    pattern,
    port,
    ratio,
    seconds,
    seconds_or_zero,
    size_bytes,
    text,
)
from pdserve.settings.shared import ProcessSettings


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(ProcessSettings):
    """Workers of both roles have an engine, a block pool and a transport."""

    worker_id: str | None = setting(
        None,
        optional(name),
        "The worker has this name, which no other worker of its service has.",
        why="A name is made of the role and a random number.",
    )
    node: str | None = setting(
        None,
        optional(text),
        "The worker runs on this node; pairs on one node are preferred.",
        why="The host name tells machines and pods apart.",
    )
    zone: str = setting(
        "",
        pattern(r"\S*", "text without spaces"),
        "The node is in this zone; pairs in one zone are preferred.",
        why="Nodes without a zone count as being in the same one.",
    )
    executor: str = setting(
        "auto",
        choice("auto", "transformers", "cpu", "cuda", "triton-interpreter", "fake"),
        "This executor computes the model.",
        why="The fastest one that can serve the model on the device is taken.",
    )
    device: str = setting(
        "auto",
        pattern(r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:N"),
        "The model is computed on this device.",
        why="A GPU is taken where there is one.",
    )
    dtype: str = setting(
        "auto",
        choice("auto", "float32", "bfloat16", "float16"),
        "Weights and activations have this type.",
        why="It is bfloat16 on a GPU and float32 on a CPU.",
    )
    quantization: str = setting(
        "none",
        choice("none", "int8", "fp8"),
        "Weights are quantized to this type.",
        why="The model answers as it was published.",
    )
    share_weights: str = setting(
        "auto",
        choice("auto", "on", "off"),
        "Workers of one machine map the packed weights of the CPU executor from one file in PDS_HOME.",
        why="Copies of their own are a little faster; where one takes a quarter of the memory, they share.",
    )
    kv_dtype: str = setting(
        "auto",
        choice("auto", "float32", "bfloat16", "float16", "fp8"),
        "Keys and values in the KV cache have this type.",
        why="It is the type of weights and activations.",
    )
    block_size: int = setting(
        16,
        integer(1, 1024),
        "One KV block holds this many tokens.",
        unit="tokens",
        why="Smaller blocks cost more descriptors, larger ones waste more of the last block.",
    )
    num_blocks: int | None = setting(
        None,
        optional(integer(2)),
        "The worker has this many KV blocks.",
        unit="blocks",
        why="As many are made as fit into the KV memory.",
    )
    kv_memory_bytes: int | None = setting(
        None,
        optional(size_bytes),
        "The KV cache takes this much memory, where NUM_BLOCKS is not set.",
        unit="bytes",
        why="A share of the free memory is taken, see KV_MEMORY_FRACTION.",
    )
    kv_memory_fraction: float | None = setting(
        None,
        optional(ratio),
        "The KV cache takes this share of the free memory, where neither its size nor NUM_BLOCKS is set.",
        unit="ratio",
        why="It is 0.9 on a GPU of its own, and 0.25 on a CPU, whose memory is shared.",
    )
    max_num_seqs: int = setting(
        64,
        integer(1),
        "One step computes at most this many sequences.",
        unit="sequences",
        why="More of them would yield more tokens together, but each more slowly.",
    )
    max_num_batched_tokens: int = setting(
        512,
        integer(1),
        "One step computes at most this many tokens.",
        unit="tokens",
        why="Blocks travel when their chunk is done: small chunks let transfer and computing overlap.",
    )
    max_wait_s: float = setting(
        10.0,
        seconds,
        "A sequence that has waited this long goes before younger and shorter ones.",
        unit="s",
        why="Short prompts may pass long ones, but not for ever.",
    )
    prefix_cache: bool = setting(
        True,
        boolean,
        "Prompts that begin alike share the KV blocks of their beginning.",
        why="A cached block is used only where all tokens before its end are the same.",
    )
    deterministic: bool = setting(
        False,
        boolean,
        "The worker starts only with an executor whose results depend on neither batch, chunks, cache hits nor worker.",
        why="Not every executor can promise that.",
    )
    threads: int | None = setting(
        None,
        optional(integer(1)),
        "The engine computes with this many CPU threads.",
        unit="threads",
        why="It takes the cores that the process may use.",
    )
    integrity: str = setting(
        "full",
        choice("full", "off"),
        "With full every transferred block has a digest that is compared before the block is used.",
        why="Damaged keys and values must never become text.",
    )
    transport: str = setting(
        "auto",
        choice("auto", "nixl", "tcp"),
        "KV blocks travel by this transport.",
        why="NIXL is taken where its READs are one-sided.",
    )
    transfer_host: str | None = setting(
        None, optional(text), "The transport listens on this address.", why="It is the address of HOST."
    )
    transfer_port: int = setting(
        0, port, "The tcp transport listens on this port; 0 takes any free one.", why="Many workers share a machine."
    )
    quarantine_s: float = setting(
        20.0,
        seconds,
        "Blocks of a READ that does not end wait this long; then the transport is made anew.",
        unit="s",
        why="It is 2 x KV_LEASE_S: after that the other side has given the blocks up, too.",
        derive=lambda values: 2 * values["KV_LEASE_S"],
    )
    handoff_timeout_s: float = setting(
        15.0,
        seconds,
        "A hand-off fails when it made no progress for this long.",
        unit="s",
        why="It is below PROGRESS_TIMEOUT_S: the workers notice before the gateway does.",
    )
    prefill_timeout_s: float = setting(
        300.0,
        seconds,
        "Computing one prompt fails after this time.",
        unit="s",
        why="A long prompt takes minutes on a CPU.",
    )
    step_timeout_s: float = setting(
        60.0,
        seconds,
        "While a step has been running for longer than this, /health fails.",
        unit="s",
        why="No step takes that long unless it hangs.",
    )
    fake_ttft_s: float = setting(
        0.0,
        seconds_or_zero,
        "A step of the fake executor that completes a prompt takes this long.",
        unit="s",
        why="Tests do not wait.",
    )
    fake_itl_s: float = setting(
        0.0,
        seconds_or_zero,
        "Tokens of one sequence are this far apart with the fake executor.",
        unit="s",
        why="Tests do not wait.",
    )
    fake_burst: int = setting(
        1,
        integer(1),
        "The fake executor makes this many tokens of a sequence at once.",
        unit="tokens",
        why="Other executors make one.",
    )
    fake_start_s: float = setting(
        0.0, seconds_or_zero, "The fake executor takes this long to load.", unit="s", why="Tests do not wait."
    )
    fake_script: str = setting(
        "hash",
        text,
        "The fake executor answers by hash, by echo, or from a JSON file of token ids.",
        why="An answer that depends on the prompt alone can be checked.",
    )

    @property
    def renewal_s(self) -> float:
        """Seconds between two lease renewals: a heartbeat, or less where the lease is short."""
        return min(self.heartbeat_s, self.kv_lease_s / 3)


@dataclass(frozen=True, kw_only=True)
class PrefillSettings(WorkerSettings):
    """A prefill worker computes prompts in chunks and offers their KV blocks under a lease."""

    prefill_step_s: float | None = setting(
        0.5,
        optional(seconds),
        "A step is cut to about this duration, because a short prompt waits for its end.",
        unit="s",
        why="A CPU computes 200 tokens in it, enough for full speed; a GPU never takes so long.",
    )


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(WorkerSettings):
    """A decode worker takes hand-offs over and decodes them in continuous batches."""

    local_prefill: str = setting(
        "auto",
        choice("auto", "never"),
        "With auto the worker computes a prompt itself when its hand-off fails.",
        why="It costs time instead of a failed request.",
    )
    tpot_slo_s: float | None = setting(
        0.25,
        optional(seconds),
        "No hand-off joins the batch, and prompt chunks are cut, where a decode step would take longer than this.",
        unit="s",
        why="It is a full batch on two laptop cores; a GPU service sets less.",
    )
    step_interval_s: float | None = setting(
        None,
        optional(seconds),
        "Steps begin at least this far apart while prompts are computed for this worker.",
        unit="s",
        why="Only cores shared with prefill need it: `pdserve up` sets it below TPOT_SLO_S.",
    )
