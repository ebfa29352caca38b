"""Metrics: names and labels of the contract, closed label sets from the start, buckets that can tell quantiles."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from pdserve.bus.bus import Bus
from pdserve.engine.kv.block_pool import BlockState
from pdserve.metrics import GatewayMetrics, ProcessMetrics, WorkerMetrics, buckets, labels, render

GATEWAY = """
pd_requests_total{model,code,finish_reason} pd_generation_tokens_total{} pd_time_to_first_token_seconds{}
pd_time_per_output_token_seconds{} pd_inter_token_latency_seconds{} pd_request_duration_seconds{}
pd_handoff_gap_seconds{} pd_ttft_stage_seconds{stage} pd_queue_requests{} pd_inflight_requests{}
pd_redispatch_total{phase,reason} pd_duplicate_tokens_dropped_total{} pd_cancelled_total{reason} pd_shed_total{reason}
"""
WORKER = """
pd_num_requests_running{} pd_num_requests_waiting{} pd_waiting_tokens{} pd_kv_cache_usage_ratio{} pd_kv_blocks{state}
pd_kv_leases_expired_total{} pd_prefix_cache_tokens_total{result} pd_step_seconds{} pd_step_tokens{} pd_batch_size{}
pd_preemptions_total{} pd_recomputed_tokens_total{} pd_draining{} pd_model_load_seconds{} pd_worker_jobs_total{result}
pd_handoff_rejected_total{reason} pd_late_messages_dropped_total{reason} pd_cache_config_info{block_size,num_blocks}
pd_kv_transfer_seconds{backend} pd_kv_transfer_bytes{backend} pd_kv_transfers_total{backend,result}
pd_kv_transfers_inflight{} pd_kv_digest_mismatch_total{}
"""
PROCESS = ["pd_bus_up{}", "pd_bus_reconnects_total{}", "process_cpu_seconds_total{}", "process_resident_memory_bytes{}"]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def samples_of(registry: CollectorRegistry) -> Iterator[Sample]:
    for family in text_string_to_metric_families(render(registry)[0].decode()):
        yield from family.samples


def labels_by_name(registry: CollectorRegistry) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for sample in samples_of(registry):
        name = sample.name.removesuffix("_bucket")
        found.setdefault(name, set()).update(set(sample.labels) - {"le"})
    return found


def check_names(registry: CollectorRegistry, expected: Iterable[str]) -> None:
    found = labels_by_name(registry)
    for line in expected:
        name, _, names = line.removesuffix("}").partition("{")
        assert found[name] == {label for label in names.split(",") if label}, name


def test_the_gateway_has_the_metrics_of_the_contract_with_exactly_these_labels(registry: CollectorRegistry) -> None:
    GatewayMetrics(registry, model="m")
    check_names(registry, GATEWAY.split())


def test_a_worker_has_the_metrics_of_the_contract_with_exactly_these_labels(registry: CollectorRegistry) -> None:
    WorkerMetrics(registry).set_cache_config(block_size=16, num_blocks=100)
    check_names(registry, WORKER.split())


def test_every_process_tells_the_state_of_its_bus_as_it_is(registry: CollectorRegistry) -> None:
    ProcessMetrics(registry, Bus("redis://127.0.0.1:1", "t", timeout_s=1))
    check_names(registry, PROCESS)
    assert registry.get_sample_value("pd_bus_up") == 0


def test_closed_label_sets_exist_with_zero_from_the_start(registry: CollectorRegistry) -> None:
    GatewayMetrics(registry, model="m")
    WorkerMetrics(registry)
    values = {(sample.name, *sorted(sample.labels.values())): sample.value for sample in samples_of(registry)}
    for reason in labels.FINISH_REASONS:
        assert values["pd_requests_total", *sorted(["m", "200", reason])] == 0
    for state in labels.BLOCK_STATES:
        assert values["pd_kv_blocks", state] == 0
    for result in labels.TRANSFER_RESULTS:
        assert values["pd_kv_transfers_total", *sorted(["tcp", result])] == 0
    for stage in labels.TTFT_STAGES:
        assert values["pd_ttft_stage_seconds_count", stage] == 0


def test_labels_that_repeat_reasons_of_processes_have_the_values_of_the_contract() -> None:
    assert set(labels.REDISPATCH_REASONS) == {
        *("no_capacity", "draining", "handoff_timeout", "handoff_failed", "integrity", "prefill_failed", "no_token0"),
        *("prefill_timeout", "deadline", "too_long", "fingerprint", "schema", "step_failed", "restarting"),
        *("cancelled", "worker_gone", "lost", "no_progress", "divergence"),
    }
    assert labels.CANCEL_REASONS == ("client", "slow_client", "deadline", "shutdown")
    assert labels.HANDOFF_REJECTIONS == ("unknown", "stale", "nonce", "generation", "geometry", "schema")
    assert labels.FINISH_REASONS == ("stop", "length", "tool_calls", "cancelled", "error")


def test_block_states_are_those_of_the_kv_ledger() -> None:
    assert tuple(state.label for state in BlockState) == labels.BLOCK_STATES


def test_requests_cannot_make_new_series(registry: CollectorRegistry) -> None:
    metrics = GatewayMetrics(registry, model="m")
    num_series = len(list(samples_of(registry)))
    rng = random.Random(0)
    for _ in range(10_000):
        metrics.count_request(rng.randrange(200, 600), rng.choice([*labels.FINISH_REASONS, str(rng.random())]))
        metrics.count_redispatch("decode", str(rng.random()))
    assert len(list(samples_of(registry))) == num_series
    ended = sum(sample.value for sample in samples_of(registry) if sample.name == "pd_requests_total")
    assert ended == 10_000


def test_an_error_in_mid_stream_is_a_200_with_finish_reason_error(registry: CollectorRegistry) -> None:
    GatewayMetrics(registry, model="m").count_request(200, "error")
    name, values = "pd_requests_total", {"model": "m", "code": "200", "finish_reason": "error"}
    assert registry.get_sample_value(name, values) == 1


def test_buckets_are_those_of_the_contract_and_contain_every_slo(registry: CollectorRegistry) -> None:
    GatewayMetrics(registry, model="m", ttft_slo_s=0.6, tpot_slo_s=0.033, handoff_slo_s=0.165)
    borders: dict[str, set[float]] = {}
    for sample in samples_of(registry):
        if sample.name.endswith("_bucket"):
            borders.setdefault(sample.name, set()).add(float(sample.labels["le"]))
    assert borders["pd_time_to_first_token_seconds_bucket"] == {*buckets.TTFT_S, 0.6, float("inf")}
    assert borders["pd_time_per_output_token_seconds_bucket"] == {*buckets.ITL_S, 0.033, float("inf")}
    assert {0.165, 80.0} < borders["pd_handoff_gap_seconds_bucket"]
    assert buckets.STAGE_S[0] == 0.0005
    assert buckets.STAGE_S[-1] == pytest.approx(32.768)
    assert len(buckets.STAGE_S) == 17
    assert buckets.COUNTS[:6] == (1, 2, 5, 10, 20, 50)


@pytest.mark.parametrize(("borders", "median_s"), [(buckets.TTFT_S, 0.3), (buckets.TTFT_S, 4.0), (buckets.ITL_S, 0.03)])
@pytest.mark.parametrize("q", [0.5, 0.95])
def test_quantiles_from_buckets_are_within_15_percent(borders: tuple[float, ...], median_s: float, q: float) -> None:
    rng = random.Random(1)
    data = sorted(median_s * rng.lognormvariate(0, 0.5) for _ in range(20_000))
    rank, below, low = q * len(data), 0, 0.0
    for high in borders:
        count = sum(low < value <= high for value in data)
        if below + count >= rank:
            break
        below, low = below + count, high
    estimate = low + (high - low) * (rank - below) / count
    assert estimate == pytest.approx(data[int(rank)], rel=0.15)


def test_block_gauges_and_usage_come_from_the_ledger(registry: CollectorRegistry) -> None:
    metrics = WorkerMetrics(registry)
    metrics.set_kv_blocks({"free": 4, "cached": 2, "owned": 1, "leased": 1})
    assert registry.get_sample_value("pd_kv_cache_usage_ratio") == 0.25
    metrics.set_kv_blocks({"free": 8})
    assert registry.get_sample_value("pd_kv_blocks", {"state": "owned"}) == 0
    assert registry.get_sample_value("pd_kv_cache_usage_ratio") == 0


def test_a_changed_cache_size_does_not_leave_the_old_one_behind(registry: CollectorRegistry) -> None:
    metrics = WorkerMetrics(registry)
    metrics.set_cache_config(block_size=16, num_blocks=100)
    metrics.set_cache_config(block_size=16, num_blocks=50)
    infos = [sample.labels for sample in samples_of(registry) if sample.name == "pd_cache_config_info"]
    assert infos == [{"block_size": "16", "num_blocks": "50"}]
