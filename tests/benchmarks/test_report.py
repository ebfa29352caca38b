import json
import math

import pytest
from benchmarks.report import Row, as_json, at_least, at_most, median_row, parser, publish, table


def test_a_row_is_the_median_of_its_runs():
    assert median_row("pdserve", "fp32", "case", "rate", "tok/s", [5.0, 1.0, 3.0]).value == 3.0
    assert median_row("pdserve", "fp32", "case", "rate", "tok/s", [4.0, 1.0]).value == 2.5


def test_runs_without_a_figure_do_not_count():
    assert median_row("pdserve", "fp32", "case", "gap", "s", [math.nan, 2.0]).value == 2.0
    assert math.isnan(median_row("pdserve", "fp32", "case", "gap", "s", [math.nan]).value)


@pytest.mark.parametrize(
    ("target", "value", "verdict"),
    [
        (at_least(0.8), 0.8, "PASS"),
        (at_least(0.8), 0.79, "FAIL"),
        (at_most(1.5), 1.5, "PASS"),
        (at_most(1.5), 1.51, "FAIL"),
        (at_least(0.0), math.nan, "FAIL"),
        (at_most(9.0), math.nan, "FAIL"),
        (None, 1.0, ""),
    ],
)
def test_a_target_is_met_or_not_and_never_by_a_missing_figure(target, value, verdict):
    assert Row("pdserve", "fp32", "case", "metric", value, "", (value,), target).verdict == verdict


def test_json_names_machine_versions_and_every_run(tmp_path):
    rows = [median_row("llama.cpp", "bf16", "decode, batch 8", "step", "ms", [1.0, 2.0, 3.0])]
    found = as_json(rows, {"llama.cpp": "1.2"})
    assert found["machine"]["num_cpus"] >= 1
    assert (found["versions"]["llama.cpp"], "torch" in found["versions"], "revision" in found["versions"]) == (
        "1.2",
        True,
        True,
    )
    assert found["rows"] == [
        {
            "engine": "llama.cpp",
            "precision": "bf16",
            "case": "decode, batch 8",
            "metric": "step",
            "value": 2.0,
            "unit": "ms",
            "runs": [1.0, 2.0, 3.0],
        }
    ]


def test_json_has_no_nan(tmp_path):
    row = median_row("pdserve", "fp32", "case", "gap", "s", [math.nan], at_most(1.5))
    assert json.loads(json.dumps(row.as_dict(), allow_nan=False)) == {
        "engine": "pdserve",
        "precision": "fp32",
        "case": "case",
        "metric": "gap",
        "unit": "s",
        "value": None,
        "runs": [None],
        "target": "≤ 1.5",
        "verdict": "FAIL",
    }


def test_the_table_is_aligned_and_shows_three_digits():
    rows = [
        median_row("pdserve", "fp32", "a", "rate", "tok/s", [1234.5]),
        median_row("pdserve", "fp32", "a long case", "ratio", "", [0.01234, 0.0222], at_least(0.01)),
    ]
    lines = table(rows).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [cell.strip() for cell in lines[2].split("|")[5:7]] == ["1234", "tok/s"]
    assert [cell.strip() for cell in lines[3].split("|")[5:10]] == [
        "0.0173",
        "",
        "0.0123–0.0222 of 2",
        "≥ 0.01",
        "PASS",
    ]


def test_the_last_line_is_the_headline_and_the_json_is_written(tmp_path, capsys):
    rows = [
        median_row("pdserve", "fp32", "case", "x", "", [1.0], at_least(2)),
        median_row("pdserve", "fp32", "case", "y", "", [1.0], at_least(1)),
    ]
    publish(rows, "all is well", parser("name", "what it is").parse_args(["--json", str(tmp_path / "f")]).json)
    assert capsys.readouterr().out.splitlines()[-1] == "all is well (1 of 2 targets met)"
    assert len(json.loads((tmp_path / "f").read_text())["rows"]) == 2
