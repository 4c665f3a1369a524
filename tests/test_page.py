"""The page of runs: what it shows of workdirs, whole ones and damaged ones, and how it stays up to date."""

import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from page_runs import PNG, address, ago, client, make_folder, make_run, rows, write_rows

from jaxdl.core.files import METRICS_FILE, STATUS_FILE, hang_file
from jaxdl.platform.page import series as series_module
from jaxdl.platform.page.render import FOLDER
from jaxdl.platform.page.scan import address_of_folder
from jaxdl.platform.page.series import AllSeries, panels, thin
from jaxdl.report.compare.curves import read_curves
from jaxdl.report.status import State


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "runs")


def names_of(answer):
    return [row["name"] for row in answer.json()["rows"]]


def all_pages(page, folder):
    """The addresses of every page of some runs."""
    ids = [address_of_folder(path) for path in sorted(folder.iterdir())]
    return ["/", *(f"/run/{run_id}" for run_id in ids), "/compare?" + "&".join(f"run={run_id}" for run_id in ids)]


def test_the_first_page_has_all_runs_and_how_they_stand(folder):
    page = client(folder)
    answer = page.get("/api/runs")
    groups = {row["name"]: row["group"] for row in answer.json()["rows"]}
    assert groups == {"good": "finished", "running": "running", "failed": "failed", "lost": "lost"}
    assert answer.json()["counts"] == {"running": 1, "finished": 1, "failed": 1, "lost": 1}
    html = page.get("/").text
    for text in ("out of memory on device 3", "COMPLETED", "LOST", "0.01", address(folder / "lost")):
        assert text in html
    assert names_of(answer)[0] == "running", "those that live are first"


def test_the_table_is_filtered_sorted_and_paged(tmp_path):
    for number in range(30):
        lines = [{"step": 1, "epoch": 1.0, "eval/loss": float((7 * number) % 30)}]
        make_run(tmp_path / f"run{number:02}", State.FAILED if number % 3 == 0 else State.COMPLETED, lines=lines)
    page = client(tmp_path)
    assert page.get("/api/runs?state=failed").json()["total"] == 10
    numbers = [number for number in range(10, 20) if number % 3]
    assert names_of(page.get("/api/runs?q=RUN1+completed&sort=workdir")) == [f"run{number}" for number in numbers]
    ordered = page.get("/api/runs?sort=eval/loss&order=down&size=25").json()
    losses = [row["metrics"]["eval/loss"] for row in ordered["rows"]]
    assert losses == [float(value) for value in range(29, 4, -1)]
    rest = page.get("/api/runs?sort=eval/loss&order=down&size=25&page=2").json()
    assert [row["metrics"]["eval/loss"] for row in rest["rows"]] == [4.0, 3.0, 2.0, 1.0, 0.0]
    assert (rest["page"], rest["pages"], rest["total"]) == (2, 2, 30)
    assert page.get("/api/runs?page=99&size=7&sort=nothing&state=none&order=x").json()["page"] == 1


def test_the_page_of_a_run_has_all_of_it(folder):
    page = client(folder)
    html = page.get(address(folder / "failed")).text
    assert "MemoryError: 12 GB" in html
    assert "out of memory on device 3" in html
    html = page.get(address(folder / "good")).text
    assert "optimizer.learning_rate" in html
    assert "confusion.png" in html
    picture = page.get(f"{address(folder / 'good')}/picture/confusion.png")
    assert (picture.content, picture.headers["content-type"]) == (PNG, "image/png")
    log = page.get(f"/api{address(folder / 'good')}/log").json()
    assert log["text"] == "first\nstep 3\nlast\n", "what a terminal overwrites is left out"


def test_curves_are_those_of_compare(folder):
    page = client(folder)
    for by in ("step", "examples", "time"):
        (folder / "good" / "examples.json").write_text('{"train": {"examples": 1280}}', encoding="utf-8")
        ids = [address_of_folder(folder / name) for name in ("good", "failed")]
        data = page.get(f"/api/curves?run={ids[0]}&run={ids[1]}&by={by}&all=1").json()
        curves = read_curves(folder / "good")
        for name in ("train/loss", "eval/loss", "eval/accuracy", "examples_per_sec"):
            where, values = curves.points(name, by)
            shown = data["runs"][0]["metrics"][name]
            np.testing.assert_allclose(shown["x"], where, rtol=1e-8)
            np.testing.assert_allclose(shown["y"], values, rtol=1e-5)
    assert data["panels"][0] == {"title": "loss", "metrics": ["train/loss", "eval/loss"], "main": True}
    assert any("by step" in problem for problem in data["runs"][1]["problems"]), "it does not say its examples"


def test_a_row_that_is_being_written_waits(tmp_path):
    run = make_run(tmp_path / "run", lines=rows(20))
    page, path = client(tmp_path), f"/api/curves?run={address_of_folder(run)}"

    def read():
        data = page.get(path).json()["runs"][0]
        return data["metrics"]["train/loss"]["x"], data["problems"]

    with (run / METRICS_FILE).open("ab", buffering=0) as file:
        assert read() == ([10, 20], [])
        file.write(b'{"step": 30, "epoch": 1.0, "train/l')
        assert read() == ([10, 20], [])
        file.write(b'oss": 0.5}\n')
        assert read() == ([10, 20, 30], [])
        file.write(b"not a row\n\0\0\0\n" + b'{"step": 40, "epoch": 1.0, "train/loss": null}\n')
        steps, problems = read()
    assert steps == [10, 20, 30]
    assert problems == ["metrics.jsonl: 2 lines are no row of metrics and not shown, the first is line 4"]
    assert page.get(path).json()["runs"][0]["metrics"]["train/loss"]["not_finite"] == 1
    (row,) = client(tmp_path).get("/api/runs").json()["rows"]
    assert row["metrics"]["train/loss"] == "nan", "not the last finite one"
    write_rows(tmp_path / "run", rows(10))  # A resumed run measures again.
    os.utime(run / METRICS_FILE, (1, 1))
    assert read() == ([10], [])


def test_what_was_read_before_is_not_read_again(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", lines=rows(5000))
    series, lines = AllSeries(), []
    monkeypatch.setattr(series_module, "parse_row", lambda line: lines.append(line) or json.loads(line))
    first = series.of(run).curves.rows
    lines.clear()
    assert series.of(run).curves.rows == first
    assert lines == []
    with (run / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write('{"step": 5010, "epoch": 9.0, "train/loss": 0.1}\n')
    assert series.of(run).curves.rows == [*first, json.loads(lines[0])]
    assert len(lines) == 1


def test_of_a_large_file_each_evaluation_is_shown_and_what_is_not_is_told(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", lines=rows(40_000))
    size = (run / METRICS_FILE).stat().st_size
    monkeypatch.setattr(series_module, "WHOLE_BYTES", size // 3)
    shown = AllSeries().of(run)
    steps = shown.curves.points("train/loss")[0]
    assert len(shown.curves.points("eval/loss")[0]) == 800
    assert shown.problems == [
        "metrics.jsonl: it is large: of the rows of training one in 4 is shown, "
        f"{4000 - len(steps):,} are not; all evaluations are"
    ]
    assert len(steps) == 1000


def test_no_spike_is_lost_when_a_curve_is_thinned():
    values = np.sin(np.arange(100_000) / 500)
    values[[77, 51_234]] = 9.0, -9.0
    where, kept = thin(np.arange(100_000), values)
    assert len(kept) <= 1002
    assert {77, 51_234, 0, 99_999} <= set(where.tolist())
    np.testing.assert_array_equal(kept, values[where])


def test_the_line_of_a_thinned_curve_is_of_means_not_of_extremes(tmp_path):
    losses = np.random.default_rng(0).lognormal(-0.5, 1.13, 20_000)
    lines = [{"step": step, "epoch": 0.0, "train/loss": loss, "huge": 1.7e308} for step, loss in enumerate(losses)]
    run = make_run(tmp_path / "run", lines=lines)
    metrics = client(tmp_path).get(f"/api/curves?run={address_of_folder(run)}&all=1").json()["runs"][0]["metrics"]
    means = metrics["train/loss"]["means"]
    assert sum(means["count"]) == 20_000
    np.testing.assert_allclose(means["y"], losses.reshape(500, 40).mean(1), rtol=1e-5)
    np.testing.assert_allclose(means["x"], np.arange(20_000).reshape(500, 40).mean(1))
    assert max(metrics["train/loss"]["y"]) == pytest.approx(losses.max(), rel=1e-5), "the faint line has the extremes"
    assert set(metrics["huge"]["means"]["y"]) == {1.7e308}
    if node := shutil.which("node"):
        drawn = drawn_by(node, metrics["train/loss"])
        assert np.mean(drawn["y"]) == pytest.approx(losses.mean(), rel=0.02)
        assert len(drawn["raw"]) > len(drawn["y"]) == len(drawn["meanX"]) == 500


def drawn_by(node, curve):
    """What the page's script draws of a curve, smoothed."""
    data = json.dumps({"runs": [{"id": "a", "metrics": {"train/loss": curve}}]})
    return of_script(node, f"seriesOf({{metrics: ['train/loss']}}, {data}, {{off: new Set(), smoothing: 0.9}})[0]")


def of_script(node, expression):
    """The value of an expression in the script that draws."""
    program = (
        f"{(FOLDER / 'static' / 'charts.js').read_text(encoding='utf-8')}\nconsole.log(JSON.stringify({expression}));"
    )
    return json.loads(subprocess.run([node, "-"], input=program, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_notes_below_a_panel_begin_with_what_is_not_finite_and_count_the_rest():
    curves = [
        {"label": f"run{n}", "left": 2, "curve": {"not_finite": int(n == 3), "x": [1], "num_points": 1}}
        for n in range(6)
    ]
    found = of_script("node", f"notes({json.dumps(curves)}, [])")
    assert found[0] == "run3: 1 value is not finite and not drawn"
    assert (len(found), found[-1]) == (5, "and 3 more")


def test_training_and_evaluation_of_a_metric_are_in_one_panel():
    names = [
        "train/grad_norm",
        "eval/accuracy",
        "train/accuracy",
        "eval/loss",
        "train/loss",
        "tokens_per_sec",
        "input/wait",
    ]
    found = panels(names)
    assert [panel["title"] for panel in found] == ["loss", "accuracy", "tokens_per_sec", "grad_norm", "input/wait"]
    assert found[1]["metrics"] == ["train/accuracy", "eval/accuracy"]
    assert [panel["main"] for panel in found] == [True, True, True, False, False]


def test_nothing_is_sent_again_that_has_not_changed(folder):
    page = client(folder)
    ids = address_of_folder(folder / "good")
    for path in ("/api/runs", f"/api/run/{ids}", f"/api/curves?run={ids}", f"/api/run/{ids}/log"):
        first = page.get(path)
        again = page.get(path, headers={"If-None-Match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b""), path
    for name, path in ((METRICS_FILE, f"/api/curves?run={ids}"), ("output.log", f"/api/run/{ids}/log")):
        etag = page.get(path).headers["etag"]
        with (folder / "good" / name).open("a", encoding="utf-8") as file:
            file.write('{"step": 210, "epoch": 9.0, "train/loss": 0.1}\n')
        assert page.get(path, headers={"If-None-Match": etag}).status_code == 200, path


def test_damaged_files_are_named_and_hide_nothing(folder):
    good = folder / "good"
    (good / STATUS_FILE).write_text('{"state": "COMP', encoding="utf-8")
    (good / "config.json").write_text("[" * 100_000, encoding="utf-8")
    (good / "summary.json").write_bytes(b"\xff\xfe\0")
    (good / "checkpoints" / "step_7").mkdir(parents=True)
    (good / "checkpoints" / "step_7" / "files.json").write_text("{}}", encoding="utf-8")
    page = client(folder)
    html = page.get(address(good)).text
    for name in ("status.json", "config.json", "summary.json", "checkpoints/step_7/files.json"):
        assert f"{name}" in html, name
    assert page.get("/api/runs").json()["counts"]["unknown"] == 1
    assert all(page.get(path).status_code == 200 for path in all_pages(page, folder))


def test_values_of_other_types_break_no_page(folder):
    good = folder / "good"
    summary = {"seconds": [1], "mesh": 3, "devices": {"a": {"b": None}}, "classes": {"x": 1}}
    (good / "summary.json").write_text(json.dumps(summary))
    (good / "config.json").write_text('{"a": "\\ud800", "b": [1, {"c": 1e999}], "optimizer": 5}')
    (good / "failures" / "9").mkdir(parents=True)
    (good / "failures" / "9" / "failure.json").write_text('["no object"]')
    (good / "checkpoints" / "step_3").mkdir(parents=True)
    (good / "checkpoints" / "step_3" / "files.json").write_text('{"files": {"a": "b", "c": [], "d": [1, 2]}}')
    with (good / METRICS_FILE).open("a") as file:
        file.write('{"step": 300, "\\ud800": 1, "train/loss": "high", "x": 1e999, "y": true, "eval/loss": [1]}\n')
        file.write('{"step": 310, "event": {"a": 1}, "kind": 3}\n')
    page = client(folder)
    addresses = [*all_pages(page, folder), "/api/runs", f"/api/curves?run={address_of_folder(good)}&all=1"]
    assert [page.get(path).status_code for path in addresses] == [200] * len(addresses)


def test_a_run_that_reports_nothing_is_called_stuck(tmp_path):
    make_run(tmp_path / "silent", State.PROCESSING, doing="training", since=ago(2000), seen=ago(1))
    os.utime(tmp_path / "silent" / METRICS_FILE, (1e9, 1e9))
    make_run(tmp_path / "hung", State.PROCESSING, doing="saving", seen=ago(1))
    (tmp_path / "hung" / hang_file(0)).write_text("stacks")
    make_run(tmp_path / "evaluates", State.PROCESSING, doing="evaluating", since=ago(2000), seen=ago(1))
    found = {row["name"]: (row["group"], row["note"]) for row in client(tmp_path).get("/api/runs").json()["rows"]}
    assert found["silent"] == ("stuck", "training; stuck: no metrics for 33 min")
    assert found["hung"] == ("stuck", "saving; stuck: its watchdog wrote hang-0.txt")
    assert found["evaluates"][0] == "running"


def test_runs_that_differ_are_compared_by_what_differs(folder):
    make_run(folder / "other", config={"batch_size": 64, "optimizer": {"kind": "lars", "learning_rate": 0.1}})
    page = client(folder)
    ids = [address_of_folder(folder / name) for name in ("good", "other")]
    html = page.get(f"/compare?run={ids[0]}&run={ids[1]}").text
    settings = html[html.index("Settings that differ") :]
    assert re.findall(r'<th scope="row">([^<]*)</th>', settings) == ["optimizer.kind"]
    assert page.get("/compare").status_code == 400
    assert page.get("/compare?" + "&".join(f"run={n}" for n in range(20))).status_code == 400


def test_what_the_page_refers_to_is_there():
    texts = "".join(path.read_text(encoding="utf-8") for path in (FOLDER / "templates").iterdir())
    assert re.findall(r"\s(?:style|on[a-z]+)=|<style|<script(?! src=)|https?://", texts) == [], "the policy forbids it"
    for name in re.findall(r'"/static/([^"]*)"', texts):
        assert (FOLDER / "static" / name).is_file(), name
    scripts = "".join((FOLDER / "static" / name).read_text(encoding="utf-8") for name in ("page.js", "charts.js"))
    assert set(re.findall(r'byId\("([a-z-]+)"\)', scripts)) <= set(re.findall(r'id="([a-z-]+)"', texts))
