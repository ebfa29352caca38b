"""The real thing once: `pdserve up` with a tiny model answers a client, is told by `status`, and stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PDS_HOME": str(tmp_path)}


@pytest.mark.usefixtures("one_up_at_a_time")
def test_up_serves_and_stops(tiny_model_dir: Path, env: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pdserve", "up", f"--model={tiny_model_dir}", "--port=0", "--num-blocks=256"]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as up:
        try:
            assert up.stdout is not None
            lines: list[str] = []
            for line in up.stdout:
                lines.append(line.strip())
                if line.startswith("Ready"):
                    break
            assert up.poll() is None, lines
            url = lines[-1].split(" at ")[1].split()[0]
            assert any(line.startswith("decode-0") and line.endswith("loading the model") for line in lines)
            chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "model": "tiny"}
            answer = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=30).raise_for_status().json()
            assert answer["usage"]["completion_tokens"] == 20
            status = subprocess.run(
                [sys.executable, "-m", "pdserve", "status", "--json"],
                env=env,
                capture_output=True,
                text=True,
                check=True,
            )
            rows = json.loads(status.stdout)
            assert sorted((row["role"], row["state"]) for row in rows) == [
                ("decode", "ready"),
                ("gateway", "ready"),
                ("prefill", "ready"),
            ]
            assert all(row["generation"] for row in rows)
            assert all("pd_" in httpx.get(row["metrics_url"], timeout=10).text for row in rows)
            os.killpg(up.pid, signal.SIGINT)
            lines += [line.strip() for line in up.stdout]
            assert up.wait(20) == 0
            assert lines[-1] == "stopped"
            assert not any("error" in line.lower() or "Traceback" in line for line in lines), lines
        finally:
            up.kill()
