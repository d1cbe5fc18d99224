"""The page of a run, `report.html`: in a real Chromium, from real runs, and from directories of somebody else."""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import shutil
import stat
import time

import numpy as np
import pytest
import toy
from conftest import make_strategy

import looplib
from looplib.__main__ import main as cli
from looplib.errors import MissingPartError, NoCheckpointError
from looplib.report.page import curves
from looplib.report.page.content import best_metric, read_run
from looplib.report.page.html import page
from looplib.report.page.verdict import findings
from looplib.report.run_report import Page
from looplib.run import choice
from looplib.run.records import Record, read_jsonl

EVIL = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8cfc000000301010018dd8db0"
    "0000000049454e44ae426082"
)


def as_records(rows):
    return [
        Record(row["step"], row["split"], {name: row[name] for name in row if name not in ("step", "split")})
        for row in rows
    ]


@pytest.fixture
def opened(browser):
    """A function that opens a file; whatever the page complains of or asks the network for fails the test."""
    pages, troubles = [], []

    def open_file(path, width=1200, scheme="light"):
        sheet = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        pages.append(sheet)
        sheet.on("console", lambda message: troubles.append(message.text))
        sheet.on("pageerror", lambda error: troubles.append(str(error)))
        sheet.on("dialog", lambda dialog: troubles.append(dialog.message))
        sheet.on("request", lambda request: troubles.append(request.url) if request.url.startswith("http") else None)
        sheet.goto(pathlib.Path(path).as_uri())
        return sheet

    yield open_file
    for sheet in pages:
        sheet.close()
    assert not troubles


def train(folder, steps=12, **settings):
    trainer, evaluator = toy.build(make_strategy("default"))
    policy = looplib.CheckpointPolicy(every_steps=4, keep=(looplib.KeepLast(), looplib.KeepBest("eval/accuracy")))
    settings = dict(model_dir=folder, checkpoints=policy, writers=None) | settings
    with toy.controller(None, trainer, evaluator, **settings) as controller:
        controller.train_and_evaluate(steps, 4)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "first"
    train(folder, 8)
    train(folder, 12)  # a second start
    return folder


@pytest.fixture(scope="module")
def other(run):
    folder = run.parent / "second"
    train(folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def evil(run, tmp_path_factory):
    """A run directory whose names and values are meant to do harm."""
    folder = tmp_path_factory.mktemp("evil") / "run"
    shutil.copytree(run, folder)
    report = json.loads((folder / "run.json").read_text())
    report |= {
        "status": EVIL,
        "error": EVIL,
        "verdict": EVIL,
        "strategy": EVIL,
        "step": 1e400,
        "not_default": {EVIL: [EVIL, 1]},
    }
    report["config"] = {EVIL: EVIL, "deep": {"a": [EVIL] * 5000}}
    report["seconds"] |= {EVIL: 3.0, "wall": "x"}
    report["traceback"], report["speed"] = (
        [EVIL],
        {"flops_per_step": 1e300, "dtype": EVIL, "share_of_peak": -1, "peak": 0},
    )
    wrong = [{"step": 10**400}, {"step": 5, "seconds": {EVIL: 1e308, "train": -1}, "host_bytes": -1}, 3]
    report["starts"][0]["points"] = [*wrong, *report["starts"][0]["points"], {"step": 5, "seconds": []}]
    report["starts"][0] |= {"command": [EVIL], "rollbacks": [{"step": 4, "to": 2, "reason": EVIL}, 7], "seconds": []}
    report["model"]["variables"] += [{"name": EVIL, "shape": ["x", 3], "parameters": 10**400}, None]
    (folder / "run.json").write_text(json.dumps(report))
    records = [
        {"step": 3, "split": EVIL, EVIL: 1.0, "loss": float("nan")},
        {"step": 10**400, "split": "train", "loss": 1},
        {"step": 5, "split": "train", "loss": 10**400, "nested": {"a": EVIL}, "\ud800": 2.0},
        {"step": -5, "split": "\u202e", "loss": 1e308, "__proto__": 1.0, "constructor": 3},
    ]
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
        file.write("[[[[[ not JSON\n\0\n" + "[" * 100_000 + "\n")
    (folder / "metrics.voided.jsonl").unlink(missing_ok=True)
    os.mkfifo(folder / "metrics.voided.jsonl")
    (folder / "code.diff").unlink(missing_ok=True)
    (folder / "code.diff").symlink_to("/etc/passwd")
    (folder / "media").mkdir()
    (folder / "media" / "good.png").write_bytes(PIXEL)
    (folder / "media" / "svg.png").write_text(f"<svg xmlns='http://www.w3.org/2000/svg'>{EVIL}</svg>")
    (folder.parent / "outside.png").write_bytes(PIXEL)
    (folder / "media" / "link.png").symlink_to(folder.parent / "outside.png")
    os.mkfifo(folder / "media" / "fifo.png")
    names = [
        "good.png",
        "svg.png",
        "link.png",
        "fifo.png",
        "../../outside.png",
        str(folder.parent / "outside.png"),
        "",
        5,
    ]
    media = [
        {"step": 4, "split": "eval", "name": EVIL, "kind": "image", "files": names},
        {"step": 4, "split": "eval", "name": EVIL, "kind": "text", "texts": [EVIL, None]},
        {"step": 4, "split": "eval", "name": EVIL, "kind": "histogram", "edges": [0.0, 1.0, 2.0], "counts": [3, 5]},
        {"step": 4, "split": "eval", "name": "bad", "kind": "histogram", "edges": [0.0, None], "counts": [1, 2, 3]},
        {"step": 4, "split": "eval", "name": "other", "kind": EVIL},
    ]  # fmt: skip
    (folder / "media.jsonl").write_text("".join(json.dumps(record) + "\n" for record in media))
    return folder


@pytest.mark.slow
def test_the_page_of_a_run_shows_what_its_files_say(run, opened):
    sheet = opened(run / "report.html")
    report, records = json.loads((run / "run.json").read_text()), read_jsonl(str(run / "metrics.jsonl"))
    assert sheet.inner_text("h1").split() == ["first", "done"]
    for split in ("train", "eval"):
        steps = [record["step"] for record in records if record["split"] == split]
        for name in {name for record in records if record["split"] == split for name in record} - {"step", "split"}:
            (drawn,) = sheet.evaluate(
                "([split, name]) => report.runs[0].curves.filter((c) => c.split === split && c.name === name && !c.undone)",
                [split, name],
            )
            assert drawn["steps"] == steps
            wanted = [record[name] for record in records if record["split"] == split]
            np.testing.assert_allclose(drawn["values"], wanted, rtol=1e-5)
    titles = sheet.locator("figure h3").all_inner_texts()
    assert titles[:2] == ["loss", "keras_accuracy"] and {"accuracy", "steps_per_second"} < set(titles)
    assert f"{report['metrics']['eval']['accuracy']:.4g}" in sheet.inner_text(".tiles")
    assert "restart" in sheet.inner_text(".key") and sheet.locator("#history tbody tr").count() == 2
    assert sheet.locator("#checkpoints tbody tr").count() == 3 and "dense" in sheet.inner_text("#model")
    waits = {name: value for name, value in report["seconds"].items() if name != "wall" and value}
    assert set(sheet.locator(".phases b").all_inner_texts()) - {"start", "off"} == set(waits)  # these of several starts
    assert report["versions"]["tensorflow"] in sheet.inner_text("#history")
    assert "480 FLOPs" in sheet.inner_text("#model") and report["speed"]["flops_per_step"] == 480
    colors = sheet.evaluate("""() => [...document.querySelectorAll("#time .phases li")].map((row) => [
      row.querySelector("b").textContent, getComputedStyle(row.firstChild).backgroundColor])""")
    drawn = sheet.evaluate("""() => [...charts].at(-2).lines.map((line) => {
      const probe = Object.assign(document.createElement("i")); probe.style.color = color(line.color);
      return [line.label, probe.style.color]; })""")
    assert dict(drawn).items() <= dict(colors).items() and len(set(dict(colors).values())) == len(dict(colors))
    tops = sheet.evaluate("[...document.querySelectorAll('.tile')].map((tile) => tile.getBoundingClientRect().top)")
    assert len(tops) >= 6 and len(set(tops)) == 1  # none stands alone
    shares = dict(sheet.evaluate("[...charts].at(-2).lines.map((line) => [line.label, [line.steps, line.values]])"))
    up_to_9 = report["starts"][1]["points"][0]["seconds"]  # a report each step
    assert shares["train"][0] == list(range(13)) and set(shares) <= set(waits)
    for name, (_, values) in shares.items():
        assert values[9] == pytest.approx(up_to_9.get(name, 0) / sum(up_to_9.values()), abs=1e-6)


@pytest.mark.slow
def test_a_failed_run_shows_its_traceback(tmp_path, opened):
    def explode(event):
        raise ValueError(EVIL)

    with pytest.raises(ValueError):
        train(tmp_path, 4, actions=[explode])
    sheet = opened(tmp_path / "report.html")
    assert not sheet.locator(".failure details pre").count()
    sheet.click("text=Traceback")
    shown = sheet.inner_text(".failure details pre")
    assert "report_page_test.py" in shown and "in explode" in shown and shown.rstrip().endswith(f"ValueError: {EVIL}")
    assert sheet.evaluate("window.hacked") is None


@pytest.mark.slow
def test_charts_are_read_and_zoomed_by_keys_and_by_the_mouse(run, opened):
    sheet = opened(run / "report.html")
    loss = [record["loss"] for record in read_jsonl(str(run / "metrics.jsonl")) if record["split"] == "train"]
    chart = sheet.locator(".plot").first
    chart.focus()
    sheet.keyboard.press("ArrowRight")
    sheet.keyboard.press("ArrowRight")
    spoken = sheet.locator("figure .unseen").first.inner_text()
    assert spoken.startswith("step 2:") and float(spoken.split("train ")[1].split()[0].rstrip(",")) == pytest.approx(
        loss[1], 1e-4
    )
    ranges = "[...charts].filter((one) => one.plot).map((one) => [one.plot.scales.x.min, one.plot.scales.x.max])"
    sheet.keyboard.press("+")
    zoomed = sheet.evaluate(ranges)
    assert (
        len(zoomed) > 2
        and all(last - first < 8 for first, last in zoomed)
        and sheet.locator("text=Show all steps").is_enabled()
    )
    sheet.keyboard.press("Escape")
    assert all(last - first >= 8 for first, last in sheet.evaluate(ranges))
    box = chart.locator(".u-over").bounding_box()
    sheet.mouse.move(box["x"] + box["width"] / 4, box["y"] + 50)
    sheet.mouse.down()
    sheet.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60, steps=4)
    sheet.mouse.up()
    assert all(last - first < 5 for first, last in sheet.evaluate(ranges))
    assert "step" in sheet.locator(".tip:visible").first.inner_text()
    sheet.get_by_label("Log scale").check()
    sheet.evaluate("document.getElementById('smoothing').value = 0.9")
    sheet.locator("#smoothing").dispatch_event("input")
    smooth = [np.average(loss[:count], weights=0.9 ** np.arange(count)[::-1]) for count in range(1, len(loss) + 1)]
    lines = sheet.evaluate("[...charts][0].plot.data.map((values) => values.filter((value) => value !== undefined))")
    assert any(len(line) == len(loss) and np.allclose(line, smooth, rtol=1e-4) for line in lines[1:])


@pytest.mark.slow
def test_the_numbers_of_an_axis_have_the_digits_that_tell_them_apart(run, opened):
    sheet = opened(run / "report.html")
    for ticks, texts in (
        ([0.00095, 0.000975, 0.001, 0.001025], ["0.00095", "0.000975", "0.001", "0.001025"]),
        ([0, 0.0005, 0.001, 0.0015], ["0", "0.0005", "0.001", "0.0015"]),
        ([0.1, 0.2, 0.30000000000000004], ["0.1", "0.2", "0.3"]),
        ([12000, 12250, 12500], ["12,000", "12,250", "12,500"]),
        ([-2e-6, 0, 2e-6], ["-2e-6", "0", "2e-6"]),
        ([0.001, None, 0.1, 1], ["0.001", "–", "0.1", "1"]),
    ):
        assert sheet.evaluate("tickTexts", ticks) == texts
    constant = [sheet.evaluate(f"padded(null, {value}, {value})") for value in (0.001, -3, 0)]
    assert constant == [[0, 0.002], [-6, 0], [-1, 1]]


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("width, scheme", [(1200, "light"), (360, "dark")])
def test_axe_finds_nothing_and_nothing_is_wider_than_the_screen(run, other, evil, opened, width, scheme, tmp_path):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    assert cli(["report", str(run.parent), f"--output={tmp_path}/compared.html"]) == 0
    assert cli(["report", str(evil), f"--output={tmp_path}/evil.html"]) == 0
    for path in (run / "report.html", tmp_path / "compared.html", tmp_path / "evil.html"):
        sheet = opened(path, width, scheme)
        sheet.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        sheet.wait_for_timeout(200)
        found = axe.run(sheet).response["violations"]
        assert not found, json.dumps(found)[:3000]
        assert sheet.evaluate("document.documentElement.scrollWidth") <= width


def test_a_hostile_directory_runs_no_script_and_shows_nothing_from_outside(evil, opened, tmp_path, capfd):
    assert cli(["report", str(evil), f"--output={tmp_path}/page.html"]) == 0
    sheet = opened(tmp_path / "page.html")
    sheet.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    assert sheet.evaluate("window.hacked") is None
    assert (
        sheet.inner_text(".failure pre") == EVIL
        and EVIL in sheet.inner_text("#settings")
        and EVIL in sheet.inner_text("#history")
    )
    assert EVIL in sheet.locator("figure h3").all_inner_texts() and EVIL in sheet.inner_text("#samples")
    assert sheet.evaluate("[...document.images].map((image) => image.width)") == [128]  # a pixel is enlarged
    assert sheet.locator("#samples img").count() == 1 and sheet.locator("script").count() == 2
    assert "root:" not in (tmp_path / "page.html").read_text() and "not finite" in sheet.inner_text("#verdict")
    policy = sheet.locator("meta[http-equiv='Content-Security-Policy']").get_attribute("content")
    assert "unsafe" not in policy and "default-src 'none'" in policy
    for attempt in (
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 3'; document.body.append(s)",
        "document.body.insertAdjacentHTML('beforeend', '<b onclick=\"window.hacked = 4\" id=bad>x</b>'); document.getElementById('bad').click()",
    ):
        quiet = sheet.context.browser.new_page()  # Chromium reports what the policy refuses, as it should
        quiet.goto((tmp_path / "page.html").as_uri())
        quiet.evaluate(attempt)
        assert quiet.evaluate("window.hacked") is None
        quiet.close()


def test_runs_are_compared_side_by_side_and_sorted(run, other, opened, tmp_path, capsys):
    assert cli(["report", str(run), str(other), f"--output={tmp_path}/page.html"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/page.html: 2 runs\n"
    sheet = opened(tmp_path / "page.html")
    rows = sheet.locator("#runs tbody tr")
    assert [text.split()[0] for text in rows.all_inner_texts()] == ["first", "second"]
    assert sheet.get_by_role("button", name="seed", exact=True).count() == 1  # the setting that differs
    sheet.get_by_role("button", name="Run", exact=True).click()
    sheet.get_by_role("button", name="Run", exact=True).click()
    first = rows.all_inner_texts()[0].split()[0]
    assert first == ("second" if sheet.locator("th[aria-sort='descending']").count() else "first")
    lines = "[...charts].find((one) => one.title === 'train loss').plot.series.length - 1"
    assert sheet.evaluate(lines) == 2
    rows.first.locator("input").uncheck()
    assert sheet.evaluate(lines) == 1


def test_the_page_of_a_sweep_leads_with_what_trials_are_compared_by(run, other, opened, tmp_path):
    folder = tmp_path / "sweep"
    for source, name in ((run, "trial-0000"), (other, "trial-0001")):
        shutil.copytree(source, folder / name)
    trials = [{"name": "trial-0001", "value": 0.763}, {"name": "trial-0000", "value": 0.755}]
    results = {"compared": "best eval/accuracy", "goal": "max", "trials": trials, "importances": {"seed": 1.0}}
    (folder / "results.json").write_text(json.dumps(results))
    assert cli(["report", str(folder), f"--output={tmp_path}/page.html"]) == 0
    sheet = opened(tmp_path / "page.html", width=1300)
    assert sheet.locator("section").first.locator("p").inner_text() == (
        "trial-0001 is the best of 2 trials: best eval/accuracy 0.763, higher is better; seed=1"
    )
    assert sheet.locator("#sweep meter").evaluate("(one) => one.value") == 1
    heads = sheet.locator("#runs th").all_inner_texts()
    assert heads[2:4] == ["best eval/accuracy", "seed"]
    assert sheet.locator("#runs td:nth-child(3)").all_inner_texts() == ["0.763", "0.755"]
    assert "eval accuracy" in heads and sheet.locator("#runs td:nth-child(3) b").all_inner_texts() == ["0.763"]
    trials[1]["value"], results["compared"] = 0.763, "eval/accuracy"  # equal, and the column of last values
    (folder / "results.json").write_text(json.dumps(results))
    assert cli(["report", str(folder), f"--output={tmp_path}/page.html"]) == 0
    sheet = opened(tmp_path / "page.html")
    assert sheet.locator("#runs th", has_text="accuracy").all_inner_texts()[0] == "eval/accuracy"
    assert "eval accuracy" not in sheet.locator("#runs th").all_inner_texts()
    assert sheet.locator("#runs td:nth-child(3) b").count() == 0
    (folder / "results.json").write_text('{"trials": 5}')
    assert cli(["report", str(folder), f"--output={tmp_path}/page.html"]) == 0
    assert opened(tmp_path / "page.html").locator("#sweep").count() == 0


def test_equal_curves_are_dashed_and_named_and_a_run_without_settings_adds_no_column(run, other, opened, tmp_path):
    shutil.copytree(run, tmp_path / "third")
    (tmp_path / "third" / "run.json").unlink()
    assert cli(["report", str(run), str(other), str(tmp_path / "third"), f"--output={tmp_path}/page.html"]) == 0
    sheet = opened(tmp_path / "page.html")
    heads = sheet.locator("#runs th").all_inner_texts()
    assert heads[2] == "seed" and heads.count("seed") == 1 and heads[-1] == "Restarts"
    figure = sheet.locator("figure", has_text="train loss")
    names = [name for name in sheet.locator("#runs bdi").all_inner_texts() if "second" not in name]
    assert f"{names[0]} and {names[1]} coincide (dashed)." in figure.inner_text()
    dashes = sheet.evaluate("[...charts].find((one) => one.title === 'train loss').plot.series.map((one) => one.dash)")
    assert dashes == [None, None, None, [7, 7]]
    sheet.locator("#runs tbody input").first.uncheck()
    assert "coincide" not in figure.inner_text()


def test_curves_coincide_where_no_eye_could_tell_them_apart(run, opened):
    sheet = opened(run / "report.html")
    line = [[0, 1.0], [10, 3.0], [20, 2.0]]
    for points, log, expected in (
        (line, False, True),
        ([[0, 1.0], [5, 2.0], [10, 3.0], [20, 2.001]], False, True),  # other steps, a little off
        ([[0, 1.0], [5, 2.1], [10, 3.0], [20, 2.0]], False, False),
        ([[10, 3.0], [20, 2.0], [30, 9.0]], False, True),  # as far as both go
        ([[20, 2.0], [30, 1.0]], False, False),  # one begins where the other ends
        ([[0, 1e-9], [10, 3.0], [20, 2.0]], True, False),
        ([[5, 2.0]], False, False),
    ):
        lines = [
            {"label": label, "steps": [step for step, _ in one], "values": [value for _, value in one]}
            for label, one in (("a", line), ("b", points))
        ]
        found = sheet.evaluate("([lines, log]) => wordsOf(coinciding(lines, log))", [lines, log])
        assert found == ("a and b coincide (dashed)." if expected else ""), points
    lines = [{**lines[0], "label": label} for label in "abcdef"]
    words, dashes = sheet.evaluate(
        "(lines) => [wordsOf(coinciding(lines)), [...dashesOf(coinciding(lines)).values()]]", lines
    )
    assert words == "a, b, c, d and 2 more coincide (dashed)."
    assert [sum(dash) for dash in dashes] == [42] * 5 and [dash[1] for dash in dashes] == [7, 14, 21, 28, 35]


def test_a_single_evaluation_is_seen_on_the_line_of_the_best_checkpoint(run, opened, tmp_path):
    found = read_run(str(run), "run")
    (best,) = (mark.step for mark in found.marks if mark.kind == "best")
    train_rows = [{"step": step, "split": "train", "loss": 1 / step} for step in range(1, 13)]
    found.curves[:] = curves.of_records(as_records([*train_rows, {"step": best, "split": "eval", "loss": 0.5}]))
    (tmp_path / "page.html").write_text(page([found], "single"))
    sheet = opened(tmp_path / "page.html")
    sheet.wait_for_selector(".u-over")
    pixel = sheet.evaluate(f"""() => {{
      const {{ plot }} = [...charts][0];
      const at = [plot.valToPos({best}, "x", true), plot.valToPos(0.5, "y", true)].map(Math.round);
      return [...plot.ctx.getImageData(...at, 1, 1).data].slice(0, 3); }}""")
    assert f"#{bytes(pixel).hex()}" == sheet.evaluate("color(1)")


@pytest.mark.slow
def test_a_million_steps_are_a_small_page_that_keeps_every_peak(run, opened, tmp_path):
    steps = 1_000_000
    values = np.abs(np.random.default_rng(0).normal(size=steps)) + 1
    values[777_777], values[333_333], values[500_000] = 100.0, 0.01, np.nan
    rows = ({"step": step, "split": "train", "loss": value} for step, value in enumerate(values.tolist()))
    found = read_run(str(run), "long")
    found.curves[:] = curves.of_records(as_records(rows))
    text = page([found], "long")
    (tmp_path / "page.html").write_text(text)
    assert len(text) < 500_000  # of which the script is a fifth
    started = time.monotonic()
    sheet = opened(tmp_path / "page.html")
    sheet.wait_for_selector(".u-over")
    assert time.monotonic() - started < 10
    drawn = sheet.evaluate("report.runs[0].curves[0]")
    at = dict(zip(drawn["steps"], drawn["values"]))
    assert (
        at[777_777] == 100.0
        and at[333_333] == 0.01
        and at[0] == pytest.approx(values[0], 1e-5)
        and max(at) == steps - 1
    )
    assert drawn["points"] == steps and drawn["bad_steps"] == [500_000] and len(at) <= 2002
    assert "loss was not finite once, first at step 500,000" in sheet.inner_text("#verdict")


@pytest.mark.slow
def test_a_notebook_shows_the_page_as_it_is_now_and_no_script_of_a_name_runs_there(tmp_path, opened):
    trainer, evaluator = toy.build(make_strategy("default"))
    folder = tmp_path / "a&quot; onload=1 <b>"
    with toy.controller(None, trainer, evaluator, model_dir=folder) as controller:
        controller.train(2)
        controller.train(5)
        shown = controller.report()
    (tmp_path / "notebook.html").write_text(f"<body>{shown._repr_html_()}</body>")
    sheet = opened(tmp_path / "notebook.html")
    frame = sheet.frame_locator("iframe")
    assert "5" in frame.locator(".tile", has_text="steps").first.inner_text().split()
    assert frame.locator("h1").inner_text().startswith(folder.name) and frame.locator(".u-over").count()
    frame.get_by_role("link", name="History").click()
    assert frame.locator("#history h2").inner_text() == "History"  # and not the notebook
    assert shown.path == str(folder / "report.html") and shown._repr_html_().count("<iframe") == 1
    with toy.controller(None, toy.Regression()) as without_directory:
        with pytest.raises(MissingPartError):
            without_directory.report()


@pytest.mark.slow
def test_a_page_that_cannot_be_written_is_one_warning_and_no_failure(tmp_path, caplog):
    def obstruct(event):
        (tmp_path / "report.html").mkdir(exist_ok=True)

    train(tmp_path, actions=[obstruct])
    assert caplog.text.count("report.html cannot be written") == 1
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "done"


def test_the_page_marks_the_checkpoint_that_a_job_would_take_as_the_best_and_none_if_no_metric_decides(run, tmp_path):
    def marked(folder):
        found = read_run(str(folder), "run")
        return [(mark.step, mark.text) for mark in found.marks if mark.kind == "best"], found.best_metric

    name, best = "eval/accuracy", choice.best(str(run / "checkpoints"))
    assert marked(run) == ([(best.step, f"best checkpoint kept: {name} {best.scores[name]:.4g}")], name)
    folder = tmp_path / "without"
    train(folder, checkpoints=looplib.CheckpointPolicy(every_steps=4))
    assert marked(folder) == ([], name)
    with pytest.raises(NoCheckpointError, match="no metric decides"):
        choice.best(str(folder / "checkpoints"))
    report = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(report | {"objective": f"min:{name}"}))  # of a sweep
    worst = choice.best(str(folder / "checkpoints"))
    assert worst.scores[name] == min(one.scores[name] for one in looplib.list_checkpoints(folder))
    assert marked(folder)[0][0][0] == worst.step
    for wrong in ("eval", 3, "max:", [f"max:{name}"]):
        (folder / "run.json").write_text(json.dumps(report | {"objective": wrong}))
        assert marked(folder) == ([], name)


def test_many_short_trainings_write_it_seldom_and_the_last_news_at_the_end(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / "report.html").unlink()
    own = Page(str(folder), lambda: None)
    written = set()
    started = time.monotonic()
    for _ in range(100):
        own.update()
        written.add((folder / "report.html").stat().st_mtime_ns)
    assert len(written) == 1 or time.monotonic() - started > 1
    before = max(written)
    own.note_news()
    own.close()
    assert (folder / "report.html").stat().st_mtime_ns > before


def of(run, rows, **changes):
    """What is said about a run with other records."""
    found = dataclasses.replace(read_run(str(run), "run"), **changes)
    found.curves[:] = curves.of_records(as_records(rows))
    metric, mode = best_metric(None, found.curves)
    found = dataclasses.replace(found, best_metric=metric, best_mode=mode)
    return " ".join(f"{one.text} {one.advice}".strip() for one in findings(found))


def test_the_verdict_follows_the_numbers(run):
    falling = [
        {"step": step, "split": "train", "loss": 1 / step, "steps_per_second": 100 if step < 80 else 50}
        for step in range(1, 101)
    ]
    worse = [
        {"step": step, "split": "eval", "loss": (step - 40) ** 2 / 1000 + 5 * (step < 20)}
        for step in range(10, 101, 10)
    ]
    assert "The rate fell" not in of(run, falling, wall=59.0)
    text = of(run, falling + worse, wall=61.0)
    assert "eval/loss was best at step 40 (0), and 3.6 at the end. Training loss kept falling: it overfits." in text
    assert "The rate fell from 100 to 50 steps a second, from step 76 on." in text and "did not fall" not in text
    ties = [{"step": step, "split": "eval", "accuracy": 0.5, "examples": 200} for step in (10, 20, 30, 40, 50)]
    text = of(run, [{**ties[0], "accuracy": 0.1}, *ties[1:4], {**ties[4], "accuracy": 0.495}])
    assert "accuracy was best at step 20 (0.5), and 0.495 at the end: it has levelled off." in text
    text = of(run, [*ties[:4], {**ties[4], "accuracy": 0.495}])
    assert "accuracy was best at step 10 (0.5), and 0.495 at the end." in text
    (accuracy, *_) = curves.of_records(as_records(ties[1:]))
    assert curves.draw(accuracy, 100, "max").best.step == 20  # the first, as of equal checkpoints
    text = of(run, [{**ties[0], "accuracy": 0.9}, *ties[1:]])
    assert "accuracy was best at step 10 (0.9), and 0.5 at the end: it got worse." in text
    recalls = [{"step": step, "split": "eval", "recall": 1 - step / 100, "loss": 1 / step} for step in (10, 20, 30)]
    text = of(run, recalls)
    assert "recall" not in text and "eval/loss was best at step 30 (0.03333), the last evaluation." in text
    flat = [{"step": step, "split": "train", "loss": 2 + step % 2} for step in range(1, 101)]
    better = [{"step": step, "split": "eval", "accuracy": step / 100} for step in range(10, 101, 10)]
    text = of(run, flat + better)
    assert (
        "Training loss did not fall: median 2.5 in the first half, 2.5 in the second." in text
        and "eval/accuracy was best at step 100 (1), the last evaluation." in text
    )
    assert "1 restart took" in text and "It may gain by training longer." in text


def test_few_values_and_a_training_that_diverges_get_no_conclusion(run):
    def scores(*values):
        return [{"step": 10 * place, "split": "eval", "accuracy": value} for place, value in enumerate(values, 1)]

    rising = scores(*np.linspace(0.1, 0.9, 10).tolist())
    assert "levelled off" in of(run, scores(0.1, 0.5, 0.9, 0.9, 0.9, 0.899))
    assert "levelled off" not in of(run, scores(0.1, 0.9, 0.9, 0.899))
    assert "levelled off" not in of(run, [*rising, {"step": 110, "split": "eval", "accuracy": 0.899}])  # a small fall
    text = of(run, scores(0.1, 0.9, 0.5))
    assert "best checkpoint" not in text and "0.5 at the end." in text
    assert "longer" not in of(run, rising[:4])
    for losses in ([1, 1, 1, 1, 2, 3, 4, 5], [1, 1, 1, 1, 1, 1, 1, None]):
        train = [{"step": 10 * place, "split": "train", "loss": loss} for place, loss in enumerate(losses, 1)]
        text = of(run, rising + train)
        assert "accuracy was best at step 100 (0.9), the last evaluation." in text and "longer" not in text
    assert "It may gain by training longer." in of(run, rising)


def test_the_verdict_of_a_run_that_did_not_come_to_its_end_has_no_advice_for_longer_ones(run):
    rows = [{"step": step, "split": "eval", "accuracy": step / 100} for step in range(10, 101, 10)]
    starts = read_run(str(run), "run").starts
    starts[-1] = dataclasses.replace(starts[-1], verdict="start-bound: start-up took 60% of the time; wait")
    for status, first in (
        ("failed", "The run failed at step 12."),
        ("killed", "The run was killed at step 12 or later. Run the same command to continue."),
        ("preempted", "The run was stopped at step 12 and has saved its state. Run the same command to continue."),
    ):
        text = of(run, rows, status=status, starts=starts)
        assert text.startswith(first) and "Start-bound" not in text and "longer" not in text
    assert "Start-bound" in of(run, rows, starts=starts)
    bad = [*rows, {"step": 5, "split": "train", "loss": None}]
    assert "--non_finite" not in of(run, bad)
    assert "Use --non_finite=halt" in of(run, bad, settings={"guards.non_finite": "off"})
    assert "Start-bound" not in page([read_run(str(run), "a"), read_run(str(run), "b")], "two").split("<script>")[0]


def test_a_start_that_found_nothing_to_train_is_no_restart(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    report = json.loads((folder / "run.json").read_text())
    last = report["starts"][-1]
    again = {**last, "restored_from": f"{folder}/checkpoints/ckpt-{last['step']}", "verdict": "start-bound: idle; wait"}
    (folder / "run.json").write_text(json.dumps({**report, "starts": [*report["starts"], again]}))
    found = read_run(str(folder), "run")
    assert len(found.starts) == 3 and [mark.kind for mark in found.marks].count("restart") == 1
    text = " ".join(one.text for one in findings(found))
    assert "1 restart took" in text and "idle" not in text


@pytest.mark.slow
def test_a_run_that_went_back_at_its_end_says_so_beside_its_restarts(run, opened, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    report = json.loads((folder / "run.json").read_text())
    report |= {"status": "done", "final_step": 4}
    (folder / "run.json").write_text(json.dumps(report))
    assert cli(["report", str(folder)]) == 0
    assert "1 restart, back at step 4" in opened(folder / "report.html").locator(".tiles").inner_text()
    assert cli(["report", str(run), str(folder), "--output", str(tmp_path / "both.html")]) == 0
    assert f"{report['step']} (back at 4)" in opened(tmp_path / "both.html").locator("table").first.inner_text()


@pytest.mark.slow
def test_every_chart_is_drawn_for_the_printer(run, opened):
    sheet = opened(run / "report.html", width=390)  # so that the last charts are far below
    assert not sheet.evaluate("[...charts].every((chart) => chart.drawn)")
    sheet.set_viewport_size({"width": 2000, "height": 900})
    sheet.evaluate("addEventListener('beforeprint', () => (window.widths = [...charts].map((one) => one.plot?.width)))")
    sheet.pdf()
    assert set(sheet.evaluate("widths")) == {640}  # an A4 sheet has 794 pixels
    sheet.wait_for_function("[...charts].every((one) => Math.abs(one.plot.width - one.frame.clientWidth) < 2)")
    charts = sheet.locator("figure:visible").count()
    assert charts > 4 and sheet.locator("figure canvas:visible").count() == charts


@pytest.mark.slow
def test_a_folder_without_a_run_is_a_sentence(tmp_path, capsys):
    assert cli(["report", str(tmp_path)]) == 2
    assert "holds no run: neither it nor a folder in it has a run.json or metrics.jsonl" in capsys.readouterr().err
    assert cli(["report", str(tmp_path / "none")]) == 2
    assert "is not a directory; name a run directory" in capsys.readouterr().err


@pytest.mark.slow
def test_a_file_that_a_user_names_is_written_through_links_and_into_what_is_no_file(run, tmp_path, capsys):
    link, target, fifo, page_begins = tmp_path / "link", tmp_path / "there.html", tmp_path / "fifo", "<!doctype html>"
    link.symlink_to(target)
    for _ in range(2):  # without and with a target
        assert cli(["report", str(run), f"--output={link}"]) == 0
        assert link.is_symlink() and target.read_text().startswith(page_begins)
    os.mkfifo(fifo)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        read_from = pool.submit(fifo.read_text)
        assert cli(["report", str(run), f"--output={fifo}"]) == 0
        assert read_from.result(60).startswith(page_begins) and fifo.is_fifo()
    capsys.readouterr()
    with open(target, "w") as own:  # as standard output is
        assert cli(["report", str(run), f"--output=/proc/self/fd/{own.fileno()}"]) == 0
        assert os.path.samestat(os.fstat(own.fileno()), target.stat()) and target.read_text().startswith(page_begins)
    assert "1 run" in (shown := capsys.readouterr()).err and not shown.out
    assert cli(["report", str(run), "--output=/dev/full"]) == 2 and cli(["report", str(run), f"--output={run}"]) == 2
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode) and "Is a directory" in capsys.readouterr().err
