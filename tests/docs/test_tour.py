"""A reader who follows docs/tour.md sees what the page shows."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .documents import ROOT
from .tour import Shell, Step, masked, steps

PAGE = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
SETTLING_S = 20.0
"""An answer is sent before the workers have put everything away; what merely looks is asked again for so long."""

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="the tour asks with curl, which is not installed")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A reader's shell beside the service that the page starts, in an empty PDS_HOME and on free ports."""
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PDS_")},
        "PDS_HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LC_ALL": "C.UTF-8",
    }
    started = re.search(r"^(pdserve up .*)$", PAGE, flags=re.MULTILINE)
    assert started is not None
    command = [sys.executable, "-m", *started[1].split(), "--port=0"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as up:
        try:
            assert up.stdout is not None
            assert any(line.startswith("Ready") for line in up.stdout), "pdserve up ended before it was ready"
            with Shell(env, tmp_path) as shell:
                yield shell
        finally:
            os.killpg(up.pid, signal.SIGINT)
            up.communicate(timeout=30)


def test_every_command_prints_what_the_page_shows(shell: Shell) -> None:
    for step in steps(PAGE):
        assert seen(shell, step) == masked(step.output), step.command


def seen(shell: Shell, step: Step) -> str:
    """What the command prints, masked; one that changes nothing is repeated until it prints what is expected."""
    output, give_up_s = masked(shell.run(step.command)), time.monotonic() + SETTLING_S
    while output != masked(step.output) and " -d " not in step.command and time.monotonic() < give_up_s:
        output = masked(shell.run(f"sleep 0.1; {step.command}"))
    return output


def test_each_station_of_the_table_is_a_section_in_order() -> None:
    stations = re.findall(r"^\| \[(\d+ [^\]]+)\]", PAGE, flags=re.MULTILINE)
    sections = re.findall(r"^## (\d+ .+)$", PAGE, flags=re.MULTILINE)
    assert [station.lower() for station in stations] == [section.lower() for section in sections]
    assert len(stations) == 15


def test_what_varies_is_masked_and_nothing_else() -> None:
    output = 'id: chatcmpl-0123456789abcdef0123456789abcdef:3\n{"created":1796082851,"ttft_s":0.0021,"tokens":3}'
    assert masked(output) == 'id: chatcmpl-<id>:<number>\n{"created":<time>,"ttft_s":<seconds>,"tokens":3}'
