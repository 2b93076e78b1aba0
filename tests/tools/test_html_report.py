"""`unshard.tools.report`: what the page says, that it loads nothing, and what a browser shows of it."""

from __future__ import annotations

import copy
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from bed.browser import Browser, browser, executable
from bed.report_samples import samples, write_recording

from unshard import tools
from unshard.errors import ArgumentError
from unshard.tools import html_report, report_parts

EMPTY = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: dict[str, str] = {}
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.section = ""
        self.feed(text)
        self.close()
        assert not self.open, f"{self.open} are not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in EMPTY:
            self.open.append(tag)
        if tag == "section":
            self.section = dict(attrs)["id"] or ""
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] != "style":
            self.texts[self.section] = self.texts.get(self.section, "") + data + " "

    @property
    def text(self) -> str:
        return " ".join(self.texts.values())

    @property
    def charts(self) -> list[dict[str, Any]]:
        return json.loads(self.scripts[0])


def page_of(*results: Any) -> Page:
    return Page(html_report.page_of({kind: list(each) for kind, each in _by_kind(results).items()}))


def _by_kind(results: tuple[Any, ...]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for each in results:
        found.setdefault(each["kind"], []).append(each)
    return found


SAYS = {
    "plan": ("memory", "Planned peak: 37.4 GiB per rank, in forward (root). The device has 40.0 GiB, which is enough."),
    "ledger": ("memory", "blocks.0.mlp.up.weight unsharded all-gathers 128.0 MiB"),
    "timeline": ("time", "Rank 5 is the slowest of 8 ranks: of 843.7 ms per step, it is busy for 782 ms"),
    "watch": ("training", "Step 118: the gradient of blocks.3.mlp.down.weight has 17 infinite elements on rank 2."),
    "verify": ("verify", "4 ranks differs gradient blocks.7.attention.q.bias 2 0.0034 1e-05 the loss is a mean"),
    "precision": ("precision", "blocks.0 … blocks.23 (24 units) 12 fp32 bf16 bf16 fp32 fp32"),
    "doctor": ("doctor", "NCCL_P2P_DISABLE 1 Problem unset it: copies go through the host"),
    "hang": ("hang", "5 outside – blocks.3 train.py:41 node-0 4105 main thread train.py:88 train"),  # noqa: RUF001
    "recording": ("training", "It is not finite in steps 118."),
}


@pytest.mark.parametrize("kind", SAYS)
def test_each_kind_has_its_section(kind: str) -> None:
    page, (section, text) = page_of(samples()[kind]), SAYS[kind]
    assert text in re.sub(r"\s+", " ", page.texts[section])
    others = {name for name in page.texts if name} - {section}
    also = {"recording": {"memory", "time", "sharding"}, "plan": {"sharding", "advice"}, "watch": {"scaler"}}
    assert others == also.get(kind, also["plan"] if kind == "ledger" else set())


def test_findings_come_first_and_problems_before_others() -> None:
    top = page_of(*samples().values()).texts[""]
    order = ["Rank 5 never reached", "Loss is not finite in 1 step, first in step 118", "NCCL_P2P_DISABLE"]
    order += [
        "Planned peak",
        "Training on 2 ranks agrees",
        "The gradient scaler skipped 3 of 200 steps (steps 3, 4, 118)",
    ]
    places = [top.index(each) for each in order]
    assert places == sorted(places)


def test_plan_beside_ledger() -> None:
    plan, ledger = samples()["plan"], samples()["ledger"]
    plan["rows"] = [{"kind": "parameters", "at_rest": 2**30, "at_peak": 2**31}, {"kind": "other", "at_peak": 0}]
    ledger["rows"] = [{"kind": "parameters", "at_rest": 2**29, "at_peak": 3 * 2**30}]
    text = re.sub(r"\s+", " ", page_of(plan, ledger).texts["memory"])
    assert "parameters 1.0 GiB 2.0 GiB 512.0 MiB 3.0 GiB +50.0%" in text


def test_the_shards_of_a_plan() -> None:
    text = re.sub(r"\s+", " ", page_of(samples()["plan"]).texts["sharding"])
    assert "on 8 ranks. Shards of each unit unit share size shards on each rank parameters elements" in text
    assert "embed 500.0 MiB 8 1.0 MiB to 4.0 MiB 1 131,072,000" in text
    text = page_of({**samples()["ledger"], "timeline": [], "peak": 2**30, "peak_at": ""}).texts[""]
    assert "Measured memory, outside a step: 1.0 GiB per rank. The device has" in text


def test_a_recording_beside_a_watch_has_all_steps_of_the_scaler() -> None:
    recording, found = samples()["recording"], samples()["watch"]
    for step in recording["steps"]:
        step["scale"] = 1024.0 if step["step"] < 118 else 512.0
    recording["steps"][117] |= {"skipped": True, "why": "gradients overflowed"}
    row = {"step": 118, "scale": 512.0, "skipped": True, "why": "Step 118: rank 2 alone became infinite"}
    found |= {"scaler": [row], "steps": 200, "initial_scale": 1024.0}
    for results in ([recording, found], [found]):
        page = page_of(*results)
        (chart,) = (each for each in page.charts if each["series"][0]["label"] == "scale")
        assert len(chart["x"]) == (200 if recording in results else 2)
        assert chart["series"][0]["values"][0] == 1024 and chart["series"][0]["values"][-1] == 512
        assert "skipped 1 of 200 steps (step 118). The scale went from 1,024 to 512." in page.texts["scaler"]
        assert "rank 2 alone became infinite" in page.texts["scaler"] and "Why is not finite" not in page.text
    assert "gradients overflowed" in page_of(recording).texts["scaler"]


def test_a_watched_run_without_findings() -> None:
    page = page_of({**samples()["watch"], "findings": [], "norms": [], "scaler": [], "steps": 7})
    assert page.texts[""].count("All values were finite in 7 watched steps.") == 1 and set(page.texts) == {
        "",
        "training",
    }


def test_charts_have_the_numbers() -> None:
    found = samples()
    page = page_of(found["plan"], found["recording"])
    area = next(chart for chart in page.charts if chart["style"] == "area")
    at = area["mark"][0]
    assert sum(each["values"][at] for each in area["series"]) == pytest.approx(found["plan"]["peak"] / 2**30, rel=1e-4)
    assert area["labels"][at] == found["plan"]["peak_at"] and area["limit"][0] == 40
    loss = next(chart for chart in page.charts if chart["series"][0]["label"] == "loss")
    values = [step["loss"] for step in found["recording"]["steps"]]
    assert loss["x"] == list(range(1, 201)) and loss["series"][0]["values"][117] is None
    kept = [value for value in loss["series"][0]["values"] if value is not None]
    assert kept == pytest.approx([value for value in values if math.isfinite(value)], rel=1e-5)
    numbers = [int(value) for _, name, value in page.attributes if name == "data-chart"]
    assert numbers == list(range(len(page.charts))) and page.tags["figcaption"] == page.tags["figure"] == len(numbers)


def test_long_runs_keep_their_extremes() -> None:
    charts = report_parts.Charts()
    values: list[float | None] = [math.sin(i / 900) for i in range(20_000)]
    values[12_345], values[12_346], values[777] = 50.0, None, -50.0
    charts.add("Loss", "Words.", list(range(20_000)), {"loss": values})
    drawn = charts.data[0]
    assert len(drawn["x"]) < 3100 and {777, 12_345, 0, 19_999} <= set(drawn["x"])
    assert drawn["series"][0]["values"][drawn["x"].index(12_345)] == 50


def test_a_page_loads_nothing() -> None:
    page = page_of(*samples().values())
    links = [value for _, name, value in page.attributes if name in ("src", "href", "srcset", "action", "data")]
    assert links and all(each.startswith("#") or each == "data:," for each in links)
    css = "".join((html_report._PAGE / name).read_text() for name in ("page.css", "uplot.css"))
    assert "url(" not in css and "@import" not in css
    policy = next(value for _, _, value in page.attributes if value.startswith("default-src"))
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy
    assert "Permission is hereby granted" in page.scripts[1]  # the licence of the library


EVIL = "</script></style><img src=x onerror=alert(1)>\"'><script>document.title = 'hit'</script><!--<script &amp;"


def spoiled(value: Any, key: str = "") -> Any:
    """Add HTML to every text of a result."""
    if isinstance(value, dict):
        return {name: spoiled(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [spoiled(each, key) for each in value]
    return (
        value + EVIL
        if isinstance(value, str) and value and not (key == "kind" and value in html_report.KINDS)
        else value
    )


def test_names_are_no_html() -> None:
    clean, page = page_of(*samples().values()), page_of(*(spoiled(each) for each in samples().values()))
    assert page.tags == clean.tags and page.tags["img"] == 0 and page.tags["script"] == 3
    assert page.text.count(EVIL) > 100 and "<" not in page.scripts[0]
    assert any(EVIL in label for chart in page.charts for label in chart["labels"] or [])
    assert {name for _, name, _ in page.attributes} == {name for _, name, _ in clean.attributes}


class Result:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def to_dict(self) -> dict[str, Any]:
        return samples()[self.kind]


def test_results_come_as_objects_dicts_files_and_folders(tmp_path: Path) -> None:
    file, folder = tmp_path / "two.json", tmp_path / "run"
    file.write_text(json.dumps([samples()["doctor"], samples()["hang"]]))
    folder.mkdir()
    path = tools.report(
        tmp_path / "new" / "page.html", Result("verify"), samples()["plan"], str(file), write_recording(folder)
    )
    page = Page(path.read_text())
    assert {"verify", "memory", "doctor", "hang", "training", "time", "sharding"} <= set(page.texts)
    assert tools.report(folder, folder) == folder / "report.html" and (folder / "report.html").is_file()
    assert "Transformer: 200 steps on 8 ranks" in page.texts[""]


def test_wrong_results(tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{")
    (tmp_path / "other.json").write_text('{"kind": "cat"}')
    for wrong, message in (
        ((), "needs at least one result"),
        ((3,), "Cannot report int"),
        ((tmp_path / "other.json",), "Cannot report a dict of kind 'cat'"),
        ((tmp_path / "no.json",), "is not JSON"),
        ((tmp_path / "missing.json",), "Cannot read"),
        ((tmp_path,), "has no recording"),
    ):
        with pytest.raises(ArgumentError, match=message):
            tools.report(tmp_path / "page.html", *wrong)
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("kind", SAYS)
def test_results_may_have_gaps(kind: str) -> None:
    """Only the first keys, and lists without elements."""
    full = samples()[kind]
    page_of({"kind": kind})
    page_of({name: [] if isinstance(value, list) else value for name, value in full.items()})
    for name, value in full.items():
        if isinstance(value, list):
            page_of({**copy.deepcopy(full), name: value[:1]})


@pytest.mark.parametrize(
    ("make", "argument", "text"),
    [
        (report_parts.size, 61.2 * 2**30, "61.2 GiB"),
        (report_parts.size, 1023, "1,023 B"),
        (report_parts.size, None, "–"),  # noqa: RUF001
        (report_parts.number, 0.000123456, "0.0001235"),
        (report_parts.number, 123456.7, "123,457"),
        (report_parts.number, math.inf, "inf"),
        (report_parts.ranks_text, [9, 0, 1, 2, 5, 6], "0-2, 5, 6, 9"),
        (report_parts.html_of, {"a<": [1, True]}, "a&lt; 1<br>yes"),
    ],
)
def test_texts(make: Callable[[Any], str], argument: Any, text: str) -> None:
    assert make(argument) == text


# -- in a browser ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    if executable() is None:
        pytest.skip("there is no Chromium to open the page with")
    with browser() as running:
        yield running


CHARTS = """[...document.querySelectorAll('[data-chart]')].map(box => {
  const canvas = box.querySelector('canvas'), {width, height} = canvas.getBoundingClientRect();
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data, colors = {};
  for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] === 255) {
    const color = [...pixels.slice(i, i + 3)].join();
    colors[color] = (colors[color] || 0) + 1;
  }
  return {width, height, box: box.clientWidth, colors, legend: box.querySelector('.u-legend').innerText};
})"""
TEAL = {False: "26,154,148", True: "76,196,189"}  # activations
BLUE = "59,111,182"  # parameters


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (375, False)])
def test_what_a_browser_shows(chromium: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    path = tools.report(tmp_path / "page.html", *samples().values())
    chromium.show(path, width=width, dark=dark)
    assert chromium.errors() == [] and chromium.requests() == [path.as_uri()]
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    charts = chromium.evaluate(CHARTS)
    assert len(charts) == len(Page(path.read_text()).charts) == 9
    for chart in charts:
        assert chart["box"] - 1 <= chart["width"] <= chart["box"] and chart["height"] == 260
        assert sum(chart["colors"].values()) > 500 and len(chart["colors"]) > 1
    areas = [chart for chart in charts if chart["colors"].get(TEAL[dark], 0) > 2000]
    assert len(areas) == 2  # of the plan and of the ledger, in which activations are the largest
    legend = re.sub(r"\s+", " ", areas[0]["legend"])
    assert "activations28.6 GiB" in legend and "forward (root)" in legend  # at the peak, without a pointer
    background = chromium.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 24, 31)" if dark else "rgb(255, 255, 255)")
    text = chromium.evaluate("document.body.innerText")
    assert "Rank 5 is the slowest of 8 ranks" in text and "Which ranks hold which unit" in text
    bars = "[...document.querySelectorAll('.bar span')].filter(e => e.getBoundingClientRect().width > 1).length"
    assert chromium.evaluate(bars) > 100
    wide = "[...document.querySelectorAll('.scroll')].some(e => e.scrollWidth > e.clientWidth)"
    assert chromium.evaluate(wide) is (width == 375)


def test_areas_are_stacked(chromium: Browser, tmp_path: Path) -> None:
    timeline = [{"at": f"forward {i}", "parameters": 2**30, "activations": 2**31} for i in range(9)]
    chromium.show(tools.report(tmp_path / "page.html", {"kind": "plan", "peak": 3 * 2**30, "timeline": timeline}))
    colors = chromium.evaluate(CHARTS)[0]["colors"]
    assert colors[TEAL[False]] / colors[BLUE] == pytest.approx(2, rel=0.15)


def test_a_browser_runs_no_text(chromium: Browser, tmp_path: Path) -> None:
    path = tools.report(tmp_path / "page.html", *(spoiled(each) for each in samples().values()))
    chromium.show(path)
    assert chromium.errors() == [] and chromium.requests() == [path.as_uri()]
    assert chromium.evaluate("document.title").startswith("Transformer</script>")
    assert len(chromium.evaluate(CHARTS)) == 9


def test_a_browser_refuses_other_scripts(chromium: Browser, tmp_path: Path) -> None:
    """If text did get into the page, the policy of the page would stop it."""
    path = tools.report(tmp_path / "page.html", samples()["hang"])
    path.write_text(path.read_text().replace("</header>", "<script>document.title = 'hit'</script></header>"))
    chromium.show(path)
    assert chromium.evaluate("document.title") != "hit" and "Content Security Policy" in str(chromium.errors())
