"""What is written while somebody waits."""

from __future__ import annotations

import io

from pdserve.verify.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_a_line_before_long_work_and_one_now_and_then() -> None:
    out, seconds = io.StringIO(), iter(range(0, 1000, 8))
    for _ in Progress(out, lambda: float(next(seconds))).over(list(range(8)), "answers"):
        pass
    lines = out.getvalue().splitlines()
    assert lines[0] == "answers: 8 to compute"
    assert lines[1:]
    assert all(line in {f"answers: {n}/8" for n in range(1, 9)} for line in lines[1:])
    assert len(lines) < 6


def test_a_terminal_gets_one_counter_that_leaves_nothing_behind() -> None:
    out = Terminal()
    for _ in Progress(out).over(list(range(3)), "answers"):
        pass
    assert "answers: 3/3" in out.getvalue()
    assert "\n" not in out.getvalue()
    assert out.getvalue().endswith("\r\x1b[K")


def test_nothing_to_do_says_nothing() -> None:
    out = io.StringIO()
    assert list(Progress(out).over([], "answers")) == []
    assert out.getvalue() == ""
