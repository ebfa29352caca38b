"""The way a user goes: apply ten lines, look, ask, delete."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from cluster.harness import ROOT, Namespace, wait_for

EXAMPLE = ROOT / "manifests" / "examples" / "demo.yaml"


def test_ten_lines_become_a_service_that_answers_and_leave_nothing_behind(
    namespace: Namespace, tmp_path_factory: pytest.TempPathFactory, record_property: Callable[[str, object], None]
) -> None:
    began_s = time.monotonic()
    namespace.kubectl("apply", "-f", str(EXAMPLE))
    namespace.wait_settled("demo", timeout_s=90)
    record_property("headline", f"demo Ready after {time.monotonic() - began_s:.1f} s")

    columns, row = namespace.kubectl("get", "pds").splitlines()
    assert columns.split() == ["NAME", "MODEL", "PREFILL", "DECODE", "TTFT", "TPOT", "SLO", "READY", "AGE"]
    assert row.split()[:4] == ["demo", "demo", "1/1", "1/1"]
    print(namespace.kubectl("get", "pds", "-o", "wide"))
    described = namespace.kubectl("describe", "pds", "demo")
    assert "Gateway, prefill and decode workers are ready." in described.split("Events:")[1]
    print(described.split("Status:")[1])

    (address,) = namespace.endpoints("demo")
    assert "Paris" in _chat(address, "What is the capital of France? Answer in one word.")

    namespace.kubectl("delete", "pds", "demo")
    wait_for(lambda: not namespace.pods(), 90, "pods have gone")
    kinds = "deploy,rs,pod,svc,cm,sa,pdb,netpol,secret,pds"
    left = [line for line in namespace.kubectl("get", kinds, "-o", "name").split() if "default" not in line]
    wait_for(lambda: left_of(namespace, kinds) == [], 20, f"nothing is left of {left}")
    assert f"{namespace.name}." not in processes(tmp_path_factory.getbasetemp())


def left_of(namespace: Namespace, kinds: str) -> list[str]:
    names = namespace.kubectl("get", kinds, "-o", "name").split()
    return [name for name in names if "default" not in name and "kube-root-ca" not in name and "No" not in name]


def processes(folder: Path) -> str:
    """Environments of all processes that this session's node runs for a service; another session has its own."""
    done = subprocess.run(["ps", "eww", "-eo", "args"], capture_output=True, text=True, check=True)
    return "\n".join(line for line in done.stdout.splitlines() if "PDS_SERVICE=" in line and str(folder) in line)


def test_explain_teaches(namespace: Namespace) -> None:
    text = wait_for(
        lambda: namespace.kubectl("explain", "pds.spec.rollout.maxSkew", check=False), 10, "OpenAPI is published"
    )
    assert "Replaced workers that one pool may be ahead of the other" in text


def _chat(address: str, question: str) -> str:
    body = {"messages": [{"role": "user", "content": question}], "stream": True, "max_tokens": 24, "temperature": 0}
    text = ""
    with httpx.stream("POST", f"http://{address}/v1/chat/completions", json=body, timeout=60) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += httpx.Response(200, text=line[6:]).json()["choices"][0]["delta"].get("content") or ""
    return text
