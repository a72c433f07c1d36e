"""The film of a run: every frame is what the log says, and what a browser draws is that too."""

import json
import math
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys

import pytest
from launch import ROOT, STAGES, launch, tiny, with_all
from test_zero_r import zero_r

sys.path.append(str(ROOT / "notebooks"))

import film  # noqa: E402

FILES = (*STAGES, "zero_r.py")
# Of each state, what a rank may have of a layer: §5.1 cuts the optimizer's, §5.2 gradients, §5.3 parameters. A gradient
# is whole from its backward pass until it is reduced.
SHARES = {
    "stage0_ddp.py": ({"whole"}, {"absent", "whole"}, {"whole"}),
    "stage1_os.py": ({"whole"}, {"absent", "whole"}, {"1/N"}),
    "stage2_grad.py": ({"whole"}, {"absent", "whole", "1/N"}, {"1/N"}),
    "stage3_param.py": ({"1/N", "whole + 1/N"}, {"absent", "whole", "1/N"}, {"1/N"}),
}
# zero_r.py with M_D keeps reduced gradients of all layers in one store, which is none's. Then a layer has none itself.
OF_CONFIG = {
    "C1": ({"whole"}, {"absent", "whole"}, {"1/N"}),
    "C4": ({"whole"}, {"absent", "whole"}, {"1/N"}),
    "full": ({"1/N", "whole + 1/N"}, {"absent", "whole"}, {"1/N"}),
    "none": SHARES["stage3_param.py"],
}


def frames(run, film_of_run):
    """(moment of the log, what is drawn of it) of all ranks."""
    for rank in film_of_run["ranks"]:
        moments = [moment for moment in run.of("timeline") if moment["rank"] == rank["rank"]]
        assert len(moments) == len(rank["marks"]) == len(film_of_run["parts"])
        yield from zip(moments, rank["marks"])


def check_frames(run, film_of_run, allowed):
    """Every frame's boxes add up to the meter's numbers, and have what the stage says."""
    seen = [set(), set(), set()]
    for moment, mark in frames(run, film_of_run):
        rest = mark["boxes"][""]
        layers = [boxes for layer, boxes in mark["boxes"].items() if layer]
        for at, state in enumerate(film.STATES):
            assert rest[state] + sum(boxes[at][0] for boxes in layers) == moment[state], (moment["label"], state)
            shares = [boxes[at][1] for boxes in layers]
            seen[at] |= {*shares}
            if film_of_run["N"] > 1:
                assert sum("whole" in share for share in shares) <= 2 or allowed[at] <= {"absent", "whole"}, state
        assert {**rest, **{state: 0 for state in film.STATES}} == {
            category: 0 if category in film.STATES else moment[category] for category in rest
        }
    assert seen == [*allowed]


@pytest.mark.parametrize("script", STAGES)
def test_a_rank_has_what_section_5_says(script):
    run = tiny(script, ranks=4)
    film_of_run = film.film_of(run.records)
    assert film_of_run["title"].startswith(script)  # the script was inferred
    check_frames(run, film_of_run, SHARES[script])
    for rank in film_of_run["ranks"]:
        (end,) = (n for n, part in enumerate(film_of_run["parts"]) if part["label"] == "before the optimizer step")
        shares = {boxes[1][1] for layer, boxes in rank["marks"][end]["boxes"].items() if layer}
        assert shares == ({"whole"} if script in STAGES[:2] else {"1/N"})
        assert all(not any(mark["boxes"][""][state] for state in film.STATES) for mark in rank["marks"])


@pytest.mark.parametrize(
    "shape,config", [((2, 2), "C4"), ((4, 1), "full"), *with_all(((2, 2), "C1"), ((2, 2), "none"))]
)
def test_a_rank_has_what_section_6_says(shape, config):
    run = zero_r(config, shape=shape)
    film_of_run = film.film_of(run.records)
    check_frames(run, film_of_run, OF_CONFIG[config])
    parts = 1 if config == "C1" else shape[0]
    for _, mark in frames(run, film_of_run):
        assert mark["boxes"][""]["gradients"] == (0 if config == "none" else film_of_run["gradients"] // parts)
    held = {span["holds"] for rank in film_of_run["ranks"] for span in rank["spans"]}
    assert ("activations" in held) == (shape[1] > 1)


def test_transfers_are_among_the_right_ranks():
    """With P_a each block's input is gathered once, within the replica, and its parameters among the others."""
    spans = film.film_of(zero_r("full").records)["ranks"][1]["spans"]  # of 2 x 2 ranks: §8's 0 and 1, 2 and 3
    gathers = [span for span in spans if (span["what"], span["layer"]) == ("all_gather", "block 1")]
    assert [(span["holds"], span["group"]) for span in gathers] == [
        ("parameters", [1, 3]), ("parameters", [1, 3]), ("activations", [0, 1]),
    ]  # fmt: skip
    assert {(*span["group"],) for span in spans if span["what"] == "reduce_scatter"} == {(1, 3)}


@pytest.mark.parametrize("script", FILES)
def test_what_lives_adds_up_to_the_peak(script):
    run = tiny(script, ranks=2)
    for memory in run.of("memory"):
        rows, found = film.peak_list(run.records, script, memory["rank"]), {}
        for category, words, count, size in rows:
            assert words and count and "%" not in words
            found[category] = found.get(category, 0) + size
        assert found == {category: size for category, size in memory["at_peak"].items() if size}
        assert sum(found.values()) - found.get("host", 0) == memory["peak"]
        assert sum(count for _, _, count, _ in rows) == sum(a["rank"] == memory["rank"] for a in run.of("alive"))


def test_the_peak_in_words():
    run = tiny("stage3_param.py", ranks=2, compute="float32")
    words = [words for _, words, _, _ in film.peak_list(run.records, "stage3_param.py", 0)]
    assert any(re.fullmatch(r"(block \d|head) widened to fp32", line) for line in words), words
    assert any("gathered whole" in line for line in words) and "fp32 parameters, momentum, variance" in words


@pytest.mark.parametrize("script", FILES)
def test_the_lines_that_run(script):
    first, source, parts = film.step_lines((ROOT / script).read_text())
    excerpt = {part: "\n".join(source[a - first : b - first + 1]) for part, (a, b) in parts.items()}
    for what in ("forward", "backward"):
        (place,) = [part for part, lines in excerpt.items() if f'meter.computing("{what}"' in lines]
        assert place == what
    assert "torch.autograd.grad" in excerpt["backward"] and "adam.step()" not in excerpt["norm"]
    assert "sum_of_squares" in excerpt["norm"] and "adam.step()" in excerpt["Adam"]
    for part, (a, b) in parts.items():  # they follow each other without a gap but for blank lines
        assert a <= b and (part in ("forward", "backward") or f'meter.mark("{part}")' in source[b - first])


def test_two_films_are_at_the_same_part():
    runs = [film.film_of(tiny(script, ranks=2).records) for script in STAGES[2:]]
    for moment in film.aligned(runs):
        for run, at in zip(runs, moment["at"]):
            assert at is None or run["parts"][at]["label"] == moment["label"]
    for number, run in enumerate(runs):  # none is missing, and none out of order
        shown = [moment["at"][number] for moment in film.aligned(runs) if moment["at"][number] is not None]
        assert shown == [*range(len(run["parts"]))]


def test_colors_are_those_of_the_notebooks():
    text = (ROOT / "notebooks/lesson.py").read_text()
    assert re.findall(r'^    "(\w+)": "(#\w{6})",$', text, re.MULTILINE) == [*film.COLORS.items()]


@pytest.mark.parametrize("case", [("stage1_os.py", 2), ("zero_r.py", 4)])
def test_the_trace_keeps_the_rules_of_its_format(case):
    script, ranks = case
    run = zero_r("C4") if script == "zero_r.py" else tiny(script, ranks=ranks)
    trace = json.loads(json.dumps(film.trace_of(run.records)))
    events, tracks, names = trace["traceEvents"], {}, {}
    assert {event["ph"] for event in events} == {"M", "X", "C", "i"}
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["name"]
        if event["ph"] == "M":
            names.setdefault((event["name"], event["pid"], event["tid"]), []).append(event["args"])
            continue
        assert math.isfinite(event["ts"]) and event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    assert all(len(args) == 1 for args in names.values())
    assert {pid for name, pid, _ in names if name == "process_name"} == set(range(ranks))
    for track, inside in tracks.items():
        assert ("thread_name", *track) in names
        stack = []  # on a track a slice lies within another or beside it
        for event in sorted(inside, key=lambda event: (event["ts"], -event["dur"])):
            while stack and stack[-1] <= event["ts"] + 2e-3:  # times are rounded to nanoseconds
                stack.pop()
            assert not stack or event["ts"] + event["dur"] <= stack[-1] + 2e-3
            stack.append(event["ts"] + event["dur"])
    start = min(memory["clock_ms"] for memory in run.of("memory"))
    clock = {memory["rank"]: memory["clock_ms"] - start for memory in run.of("memory")}
    kinds = [(event["pid"], event["cat"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    shown = sorted(kind for kind in kinds if kind[1] != "waits")
    spans = sorted(
        (s["rank"], s["what"], 1e3 * (clock[s["rank"]] + s["start_ms"]), 1e3 * (s["end_ms"] - s["start_ms"]))
        for s in run.of("span")
    )
    assert len(shown) == len(spans)
    for one, other in zip(shown, spans):
        assert one[:2] == other[:2] and one[2:] == pytest.approx(other[2:], abs=2e-3)
    counted = [event["args"] for event in events if event["ph"] == "C"]
    assert counted == [{c: m[c] for c in film.COLORS if c in m} for m in run.of("timeline")]


# ---- In a browser --------------------------------------------------------------------------------------------------

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(not BROWSER, reason="no Chromium here, Debian's package chromium")
# Added to a copy of the film it moves the slider, presses keys, and writes into the page what is drawn after each.
ASK = """
<script>
const seen = [];
const look = what => seen.push({what, moment: +document.body.dataset.moment,
  boxes: [...document.querySelectorAll(".box")].map(box => {
    const [frame, fill] = [...box.querySelectorAll("rect")].map(rect => +rect.getAttribute("width"));
    return {...box.dataset, run: [...document.querySelectorAll(".run")].indexOf(box.closest(".run")), frame, fill};
  }), slices: [...document.querySelectorAll(".slice")].map(slice => ({...slice.dataset})),
  lit: document.querySelectorAll(".lit").length, lines: document.querySelectorAll("pre .on").length,
  totals: [...document.querySelectorAll(".total")].map(total => +total.dataset.bytes)});
const press = key => dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
const slider = document.getElementById("slider");
look("opened");
for (const moment of MOMENTS) {
  slider.value = moment;
  slider.dispatchEvent(new Event("input"));
  look("slider");
}
press("ArrowRight"); look("right"); press("ArrowLeft"); press("ArrowLeft"); look("left"); press("Home");
document.getElementById("speed").value = 3; press(" ");

const poll = setInterval(() => {
  if (+document.body.dataset.moment < 1) return;
  clearInterval(poll);
  press(" "); look("played");
  setTimeout(() => {
    look("paused"); press("c"); look("clock");
    const told = document.createElement("script");
    told.type = "application/json"; told.id = "told"; told.textContent = JSON.stringify(seen);
    document.body.append(told);
  }, 300);
}, 5);
</script>
"""


def browse(page, *options, width=1280):
    """Runs Chromium without a window. Returns (the page as it has become, what it wrote to the console)."""
    command = [BROWSER, "--headless", "--disable-gpu", f"--window-size={width},1400", "--virtual-time-budget=10000"]
    command += ["--no-sandbox"] if os.geteuid() == 0 else []
    command += ["--enable-logging=stderr", "--hide-scrollbars", *options, page.as_uri()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return ended.stdout, [line for line in ended.stderr.splitlines() if "CONSOLE" in line]


def told(page, moments):
    copy = pathlib.Path(str(page) + ".asked.html")
    copy.write_text(page.read_text().replace("</html>", ASK.replace("MOMENTS", json.dumps(moments)) + "</html>"))
    for _ in range(5):  # on a busy machine Chromium's ten seconds may pass without a frame, and so without an answer
        dom, complaints = browse(copy, "--dump-dom")
        assert not complaints
        answers = re.findall(r'<script type="application/json" id="told">(.*?)</script>', dom, re.DOTALL)
        if answers:
            break
    return json.loads(answers[0])


def make(tmp_path, *runs):
    """The film by the command line, as a user makes it."""
    for number, run in enumerate(runs):
        lines = "".join(json.dumps(record) + "\n" for record in run.records)
        (tmp_path / f"run{number}.jsonl").write_text(lines)
    logs = [tmp_path / f"run{number}.jsonl" for number in range(len(runs))]
    subprocess.run(
        [sys.executable, ROOT / "notebooks/film.py", *logs], check=True, cwd=tmp_path, stdout=subprocess.PIPE
    )
    return tmp_path / "run0.html"


@needs_browser
@pytest.mark.parametrize("scripts", [("stage2_grad.py", "stage3_param.py"), ("zero_r.py",)])
def test_a_browser_draws_what_the_log_says(scripts, tmp_path):
    runs = [zero_r("full") if script == "zero_r.py" else tiny(script, ranks=4) for script in scripts]
    page, moments = make(tmp_path, *runs), film.aligned([film.film_of(run.records) for run in runs])
    # amid three parts that all runs have: a forward, a backward, an update
    labels = [moment["label"] for moment in moments]
    chosen = [labels.index(label) for label in ("forward block 0", "backward block 0", "parameters updated")]
    opened, *slid, right, left, played, paused, clock = told(page, [at + 0.5 for at in chosen])
    for at, picture in zip(chosen, slid):
        assert picture["moment"] == at + 0.5 and picture["lines"] > 0
        totals, lit, slices = [], 0, []
        for number, run in enumerate(runs):
            film_of_run, drawn = film.film_of(run.records), [box for box in picture["boxes"] if box["run"] == number]
            for rank in range(4):
                mine = [box for box in drawn if box["rank"] == str(rank)]
                moment = [moment for moment in run.of("timeline") if moment["rank"] == rank][moments[at]["at"][number]]
                totals.append(
                    sum(moment[category] for category in film.COLORS if category in moment) - moment.get("host", 0)
                )
                for category in film.COLORS:
                    bytes_drawn = sum(int(box["bytes"]) for box in mine if box["category"] == category)
                    assert bytes_drawn == moment.get(category, 0), (labels[at], rank, category)
                for box in mine:  # as wide as it is large
                    if box["layer"]:
                        size, whole = int(box["bytes"]), film_of_run["whole"][box["layer"]][box["category"]]
                        assert size == moment["held"].get(box["layer"], {}).get(box["category"], 0)
                        filled = (box.get("fill") or 0) / box["frame"] if size else 0
                        assert filled == pytest.approx(min(1, size / whole), abs=0.02)
                # The clock stands half way between two marks.
                marks = [moment["ms"] for moment in run.of("timeline") if moment["rank"] == rank]
                before = moments[at]["at"][number] - 1
                ms = 0.5 * (marks[before] if before >= 0 else 0) + 0.5 * marks[before + 1]
                running = [span for span in film_of_run["ranks"][rank]["spans"] if span["start"] <= ms < span["end"]]
                lit += any(span["what"] in ("forward", "backward") for span in running)
                for span in running:
                    slices += [[span["what"], span["layer"], other, rank] for other in {*span["group"]} - {rank}]
        assert picture["totals"] == totals and picture["lit"] == lit
        drawn = [[slice["what"], slice["layer"], int(slice["from"]), int(slice["to"])] for slice in picture["slices"]]
        assert sorted(drawn) == sorted(slices)
    assert (right["moment"], left["moment"]) == (min(chosen[2] + 1, len(moments) - 1) + 0.5, right["moment"] - 2)
    assert 1 <= paused["moment"] == played["moment"]  # the space bar plays and pauses
    assert len(clock["boxes"]) == len(paused["boxes"])


@needs_browser
@pytest.mark.parametrize("width", [1280, 400])
def test_a_page_as_wide_as_the_window(width, tmp_path):
    page = make(tmp_path, tiny("stage2_grad.py", ranks=4), tiny("stage3_param.py", ranks=4))
    picture = tmp_path / "film.png"
    _, complaints = browse(page, f"--screenshot={picture}", width=width)
    assert not complaints and struct.unpack(">II", picture.read_bytes()[16:24])[0] == width
    dom, _ = browse(page, "--dump-dom", width=width)
    rights = [float(x) + float(w) for x, w in re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', dom)]
    assert max(rights) <= (width / 2 if width > 900 else 500)  # without a picture a window is 500 wide or more


@needs_browser
def test_an_error_in_the_page_would_be_seen(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<script>missing()</script>")
    assert browse(page, "--dump-dom")[1]


def test_the_default_run_fits_in_a_mail(tmp_path):
    run = launch("stage3_param.py", "--steps", 1, "--device", "cpu", ranks=4, timeout=300)
    page = make(tmp_path, run)
    assert page.stat().st_size < 1e6
    text = page.read_text()
    assert "http" not in text and not re.search(r"<(link|img|iframe)|<script src|@import|url\(", text)


def test_a_log_without_a_metered_step_is_refused(tmp_path):
    (tmp_path / "run.jsonl").write_text('{"event": "config"}\n')
    ended = subprocess.run(
        [sys.executable, ROOT / "notebooks/film.py", tmp_path / "run.jsonl"], capture_output=True, text=True
    )
    assert ended.returncode == 2 and "no records of a metered step" in ended.stderr
