"""Makes a film of one training step out of the log of a run:

    torchrun --standalone --nproc-per-node 4 stage3_param.py --log-file run.jsonl
    python notebooks/film.py run.jsonl                # writes run.html; open it in a browser
    python notebooks/film.py two.jsonl three.jsonl    # two runs side by side, at the same part of the step
    python notebooks/film.py run.jsonl --trace run.json    # for https://ui.perfetto.dev or chrome://tracing

The film shows the metered step, the last of the run. It needs nothing but this file, film_page.html and the log. In a
notebook, show_film(run) displays the film of a lesson.run().

A mark of the meter ends a part of the step, and says what lives at that moment. The film has a picture for each part,
and in it the boxes are what its mark says. What lived in between is known at one moment more, the peak.

The log does not tell which script wrote it. film.py infers that from what was partitioned just before the optimizer
step. One rank partitions nothing and passes for stage 0: give --script there, and for a copy of a script.
"""

import argparse
import ast
import difflib
import html
import json
import math
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
SCRIPTS = ("stage0_ddp.py", "stage1_os.py", "stage2_grad.py", "stage3_param.py", "zero_r.py")
STATES = ("parameters", "gradients", "optimizer")
# The colours of lesson.py, which is not imported because it needs matplotlib and torch. A test compares them.
COLORS = {
    "optimizer": "#332288",
    "parameters": "#0065A0",
    "gradients": "#D55E00",
    "activations": "#56B4E9",
    "buffers": "#F0E442",
    "host": "#9A9A9A",
}
SECTIONS = {
    "§3.2": "residual states", "§5.1": "P_os", "§5.2": "P_os+g", "§5.3": "P_os+g+p", "§6.1": "P_a", "§6.2": "C_B",
    "§6.3": "M_D", "§8": "tensor parallelism",
}  # fmt: skip


# ---- Reading a log -------------------------------------------------------------------------------------------------


def of(records, event, rank=None):
    return [record for record in records if record["event"] == event and rank in (None, record.get("rank"))]


def groups(config):
    """(N, M): ranks that share the states of one model or part of it (§5), and ranks of a replica (§8)."""
    return config["world_size"], config.get("mp", 1)


def sizes(config):
    """Bytes per parameter of what is stored, and of a gradient that waits for the optimizer step."""
    stored = 4 if config["dtype"] == "float32" else 2
    return stored, stored if config["micro_batches"] == 1 else 4


def infer_script(records):
    """The script that wrote a log: the stage is the number of states of which a rank has a part."""
    (config, *_), (memory, *_) = of(records, "config"), of(records, "memory")
    if "partition" in config:
        return "zero_r.py"
    stored, summed = sizes(config)
    per_parameter = {"optimizer": 12, "gradients": summed, "parameters": stored}
    cut = [memory[state] < 0.99 * size * config["psi"] for state, size in per_parameter.items()]
    return SCRIPTS[sum(cut)]


def whole_layers(records, script):
    """{layer: {state: bytes if it is whole}}. The optimizer's 12 bytes per parameter are there all the time."""
    (config, *_), (moment, *_) = of(records, "config"), of(records, "timeline")
    stored, summed = sizes(config)
    parts = 1 if script == "stage0_ddp.py" else groups(config)[0]
    whole = {}
    for layer, held in moment["held"].items():
        padded = held["optimizer"] // 12 * parts
        whole[layer] = {"parameters": stored * padded, "gradients": summed * padded, "optimizer": 12 * padded}
    return whole


def share(size, whole, N):
    """How much of a layer it is, in words: "absent", "1/N", "whole", "whole + 1/N" or another multiple."""
    names = {0: "absent", 1 / N: "1/N", 1 + 1 / N: "whole + 1/N", 1: "whole"}  # the last one wins if N is 1
    near = [name for part, name in names.items() if math.isclose(size, part * whole, rel_tol=1e-9, abs_tol=0.5)]
    return near[-1] if near else f"{size / whole:.2f} of it"


def boxes(moment, whole, N):
    """What is drawn of a moment: {layer: [[bytes, share] of each state]}, and under "" the bytes of every category that
    belong to no layer. Together they are the meter's numbers."""
    found = {}
    rest = {category: moment[category] for category in COLORS if category in moment}
    for layer, full in whole.items():
        held = [moment["held"].get(layer, {}).get(state, 0) for state in STATES]
        found[layer] = [[size, share(size, full[state], N)] for size, state in zip(held, STATES)]
        for size, state in zip(held, STATES):
            rest[state] -= size
    return found | {"": rest}


def gathers_of_inputs(records, config, rank):
    """The numbers of the spans in which P_a gathers a block's input within the replica. They are called all_gather too,
    so they are told by their order: the third of a block in a micro-batch where parameters are gathered in forward and
    backward, else all but the last, which brings the new parameters."""
    if config.get("pa", "off") == "off" or config["mp"] == 1:
        return set()
    places = {}
    for number, span in enumerate(of(records, "span", rank)):
        if span["what"] == "all_gather" and span["layer"].startswith("block"):
            places.setdefault(span["layer"], []).append(number)
    third = config["partition"] == "os+g+p"
    return {number for numbers in places.values() for number in (numbers[2::3] if third else numbers[:-1])}


def transfers(records, script, rank):
    """The spans of a rank: [{what, layer, start, end, waiting, holds, group}]. `holds` is the category of what
    travels, `group` the ranks that do it together; -1 stands for all those that the log has no records of."""
    (config, *_), recorded = of(records, "config"), [memory["rank"] for memory in of(records, "memory")]
    N, M = groups(config)
    inputs, found = gathers_of_inputs(records, config, rank), []
    spans = of(records, "span", rank)
    computing = [span for span in spans if span["what"] in ("forward", "backward")]
    for number, span in enumerate(spans):
        what, layer, holds, group = span["what"], span["layer"], "", []
        if number in inputs or what == "all_reduce":
            holds, group = "activations", range(rank // M * M, rank // M * M + M)
            # An all-reduce within a block does not say which: the one that computes.
            running = [part for part in computing if part["start_ms"] <= span["start_ms"] <= part["end_ms"]]
            layer = layer or (running[0]["layer"] if running else "")
        elif what in ("reduce_scatter", "all_gather"):
            averaged = what == "reduce_scatter" or script == "stage0_ddp.py"
            holds, group = "gradients" if averaged else "parameters", range(rank % M, N * M, M)
        group = [other for other in group if other in recorded] + [-1] * (not set(group) <= {*recorded})
        start, end = span["start_ms"], span["end_ms"]
        found.append({"what": what, "layer": layer, "start": start, "end": end, "waiting": end - span["waited_ms"]})
        found[-1] |= {"holds": holds, "group": group}
    return found


# ---- The peak, in words --------------------------------------------------------------------------------------------


def listed(layers):
    """['block 4', 'block 5', 'head'] -> 'blocks 4 to 5, head'"""
    blocks = sorted(int(layer.split()[1]) for layer in layers if layer.startswith("block "))
    others = [layer for layer in layers if not layer.startswith("block ")]
    if len(blocks) > 2 and blocks[-1] - blocks[0] == len(blocks) - 1:
        return ", ".join([f"blocks {blocks[0]} to {blocks[-1]}", *others])
    return ", ".join([*(f"block {number}" for number in blocks), *others])


FAMILIES = {
    "mm": "matrix products", "layer_norm": "LayerNorm", "attention": "attention", "gelu": "GELU", "_to_copy": "copies",
}  # fmt: skip


def in_words(storage, whole, N, peak_in):
    """What a storage is: words, where "%" stands for the layers of all that have the same words."""
    category, operation, part = storage["category"], storage["operation"].removeprefix("aten."), storage["part"]
    layer, elements, before = storage["layer"], math.prod(storage["shape"]), operation == "before the step"
    running = part.partition(" ")[2]  # the layer whose call or backward made it
    full = whole.get(layer, {}).get(category)
    if category == "host":
        return "kept layer inputs, in host memory"
    if category == "optimizer":
        return "fp32 parameters, momentum, variance"
    if category == "parameters":
        return "parameters that are always here" if before else "% gathered whole"
    if category == "gradients":
        if not layer:
            return "one store for the gradients of all layers (M_D)"
        return "reduced gradients, 1/N: %" if N > 1 and storage["bytes"] < full else "whole gradients: %"
    if category == "buffers":
        if elements <= 1:
            return "scalars, Adam's step counters"
        if "empty" in operation:
            return "receive buffer of the reduce-scatter"
        if operation.startswith("_to_copy"):
            return "fp32 gradients, which Adam reads"
        return "sums of what is received, fused buffers"
    if before:
        return "tokens" if len(storage["shape"]) > 1 else "one store for kept layer inputs (M_D)"
    if part != peak_in:
        if part.startswith("forward"):
            return "kept layer inputs"
        return f"derivative from {running}" if part else "a layer's input, brought back"
    if operation.startswith("_to_copy") and running in whole and elements == whole[running]["optimizer"] // 12:
        return f"{running} widened to fp32"
    family = [words for name, words in FAMILIES.items() if name in operation]
    return f"{part}: {family[0] if family else 'other results'}"


def peak_list(records, script, rank):
    """What lives at the peak: [[category, words, number of storages, bytes]], the largest first."""
    (memory,), whole, N = (
        of(records, "memory", rank),
        whole_layers(records, script),
        groups(of(records, "config")[0])[0],
    )
    found = {}
    for storage in of(records, "alive", rank):
        words = in_words(storage, whole, N, memory["peak_in"])
        entry = found.setdefault((storage["category"], words), [0, 0, {}])
        entry[0], entry[1] = entry[0] + 1, entry[1] + storage["bytes"]
        entry[2][storage["layer"]] = True
    rows = [
        [category, words.replace("%", listed(layers)), n, size]
        for (category, words), (n, size, layers) in found.items()
    ]
    return sorted(rows, key=lambda row: -row[3])


# ---- The lines of the train step -----------------------------------------------------------------------------------


def step_lines(text):
    """(number of the first line of train_step, its lines, {part: (first, last line)}). A part is "forward", "backward"
    or the label of a mark. It begins after the mark before it, or at its heading, "# 3. Global norm: ..."."""
    (step,) = (node for node in ast.parse(text).body if getattr(node, "name", "") == "train_step")
    lines = text.splitlines()
    loop = next(node for node in step.body if isinstance(node, ast.For) and ast.unparse(node.iter).find("batches") >= 0)
    headings, start, parts = {}, loop.end_lineno + 1, {}
    for number in range(step.lineno, step.end_lineno + 1):
        line = lines[number - 1]
        if match := re.match(r" +# (\d)\. ", line):
            headings[match[1]] = number
            start = number if number > loop.end_lineno else start
        if match := re.match(r' +meter\.mark\("(.*)"\)', line):
            parts[match[1]], start = (start, number), number + 1
    parts |= {"forward": (headings["1"], headings["2"] - 1), "backward": (headings["2"], loop.end_lineno)}
    return step.lineno, [line.removeprefix("    ") for line in lines[step.lineno - 1 : step.end_lineno]], parts


# ---- The film ------------------------------------------------------------------------------------------------------


def film_of(records, script=None, title=""):
    """All that the page needs of one run."""
    (config, *_), script = of(records, "config"), script or infer_script(records)
    path = pathlib.Path(script)
    path = path if path.is_absolute() or path.exists() else HERE.parent / script
    first, source, parts = step_lines(path.read_text())
    N, M = groups(config)
    whole = whole_layers(records, path.name)
    run = {"N": N, "M": M, "whole": whole, "source": source, "first": first, "ranks": [], "parts": []}
    shown = f"N = {N}" + (f", M = {M}" if M > 1 else "")
    run["title"] = f"{path.name}, {shown}" + (f", --config {config['config']}" if "config" in config else "")
    run["title"] += f" ({title})" if title else ""
    run["gradients"] = sum(full["gradients"] for full in whole.values())  # of a store that holds those of all layers
    for memory in of(records, "memory"):
        rank, moments = memory["rank"], of(records, "timeline", memory["rank"])
        marks = [{"ms": m["ms"], "boxes": boxes(m, whole, N)} for m in moments]
        for mark, moment in zip(marks, moments):
            mark["total"] = {category: moment[category] for category in COLORS if category in moment}
        # Of several parts with the label of the peak's it is in the one that ends with the most.
        peak_in = max(
            (number for number, moment in enumerate(moments) if moment["label"] == memory["peak_in"]),
            key=lambda number: sum(size for name, size in marks[number]["total"].items() if name != "host"),
        )
        run["ranks"].append(
            {
                "rank": rank, "index": rank // M, "clock": memory["clock_ms"], "marks": marks,
                "spans": transfers(records, path.name, rank), "peak": memory["peak"], "at_peak": memory["at_peak"],
                "peak_in": peak_in, "alive": peak_list(records, path.name, rank),
            }
        )  # fmt: skip
    for moment in of(records, "timeline", run["ranks"][0]["rank"]):
        label = moment["label"]
        lines = parts[label if label in parts else label.split()[0]]
        text = "\n".join(source[lines[0] - first : lines[1] - first + 1])
        sections = [
            f"{mark} {SECTIONS.get(mark, '')}".strip() for mark in dict.fromkeys(re.findall(r"§\d+(?:\.\d+)*", text))
        ]
        run["parts"].append({"label": label, "lines": lines, "sections": sections})
    return run


def aligned(runs):
    """The parts of all runs in one order: [{label, at: [number of the part in each run, or null]}]."""
    labels = [[part["label"] for part in run["parts"]] for run in runs]
    if len(runs) == 1:
        return [{"label": label, "at": [number]} for number, label in enumerate(labels[0])]
    found = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, *labels, autojunk=False).get_opcodes():
        if kind == "equal":
            found += [{"label": labels[0][i], "at": [i, j]} for i, j in zip(range(a, b), range(c, d))]
        else:
            found += [{"label": labels[0][i], "at": [i, None]} for i in range(a, b)]
            found += [{"label": labels[1][j], "at": [None, j]} for j in range(c, d)]
    return found


def page(runs):
    """The film of one or two runs, each from film_of(), as HTML."""
    film = {"moments": aligned(runs), "colors": COLORS, "states": STATES, "runs": runs}
    data = json.dumps(film, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    title = html.escape(" beside ".join(run["title"] for run in runs))
    return (HERE / "film_page.html").read_text().replace("{{title}}", title).replace("{{film}}", data)


def show_film(*runs, scripts=(None, None), height=760):
    """In a notebook: the film of one or two results of lesson.run() or lesson.simulate(), in a frame of its own."""
    from IPython.display import HTML, display

    text = page([film_of(run.records, script) for run, script in zip(runs, scripts)])
    style = f'style="width:100%;height:{height}px;border:0"'
    frame = f'<iframe {style} title="a film of a training step" srcdoc="{html.escape(text)}"></iframe>'
    display(HTML(f"<div>{frame}</div>"))  # IPython warns of an iframe alone; its own kind can't have a page within


# ---- The trace -----------------------------------------------------------------------------------------------------


def trace_of(records, script=None):
    """The step in Chrome's trace format, as torch.profiler writes it: a process for each rank, in it a track for what
    computes and one for each kind of transfer, with more lanes where they overlap; the memory as counters at the marks.
    Times are microseconds from the first rank's start."""
    script = pathlib.Path(script or infer_script(records)).name
    began = min(memory["clock_ms"] for memory in of(records, "memory"))
    events = []

    def add(phase, pid, tid, name, **more):
        events.append({"ph": phase, "pid": pid, "tid": tid, "name": name} | more)

    for memory in of(records, "memory"):
        rank, tracks, ends = memory["rank"], {}, []  # tracks: their names -> tid; ends: when each is free again

        def us(ms, start=memory["clock_ms"] - began):
            return round(1e3 * (start + ms), 3)

        add("M", rank, 0, "process_name", args={"name": f"rank {rank}"})
        add("M", rank, 0, "process_sort_index", args={"sort_index": rank})
        for span in sorted(transfers(records, script, rank), key=lambda span: span["start"]):
            computes = span["what"] in ("forward", "backward")
            kind = "computation" if computes else span["what"]
            lane = 0
            while True:
                track = f"{kind} {lane + 1}" if lane else kind
                if track not in tracks:
                    tracks[track] = len(tracks)
                    ends.append(-math.inf)
                    add("M", rank, tracks[track], "thread_name", args={"name": track})
                    add("M", rank, tracks[track], "thread_sort_index", args={"sort_index": tracks[track]})
                if ends[tracks[track]] <= span["start"]:
                    break
                lane += 1
            tid, ends[tracks[track]] = tracks[track], span["end"]
            start, waiting, end = us(span["start"]), us(span["waiting"]), us(span["end"])
            name = f"{span['what']} {span['layer']}" if computes else span["layer"] or span["what"]
            args = {"layer": span["layer"], "holds": span["holds"]}
            add("X", rank, tid, name, ts=start, dur=round(end - start, 3), cat=span["what"], args=args)
            if waiting < end:  # Python, or the GPU's stream, waits for it here
                waiting = max(start, waiting)
                add("X", rank, tid, "waits", ts=waiting, dur=round(end - waiting, 3), cat="waits", args={})
        for moment in of(records, "timeline", rank):
            counted = {category: moment[category] for category in COLORS if category in moment}
            add("C", rank, 0, "memory", ts=us(moment["ms"]), args=counted)
            add("i", rank, 0, moment["label"], ts=us(moment["ms"]), s="p", cat="mark")
    return {"traceEvents": events, "displayTimeUnit": "ms"}


# ---- The command line ----------------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", nargs="+", type=pathlib.Path, help="one or two files of --log-file")
    parser.add_argument("-o", "--output", type=pathlib.Path, help="the film (default: the first log's name with .html)")
    parser.add_argument("--script", action="append", help="what wrote the log, for its lines; again for a second log")
    parser.add_argument("--trace", type=pathlib.Path, help="write a trace of the first log to this file instead")
    options = parser.parse_args()
    if len(options.log) > 2:
        parser.error("a film shows one run or two")
    scripts, logs = (options.script or []) + [None, None], []
    for path in options.log:
        if sys.stderr.isatty():
            print(f"reading {path}", file=sys.stderr)
        try:
            logs.append([json.loads(line) for line in path.read_text().splitlines()])
        except (OSError, ValueError) as error:
            parser.error(f"{path}: {error}")
        if not of(logs[-1], "alive"):
            parser.error(f"{path} has no records of a metered step; did the run end?")
    if options.trace:
        output, text = options.trace, json.dumps(trace_of(logs[0], scripts[0]))
    else:
        output = options.output or options.log[0].with_suffix(".html")
        text = page([film_of(log, script) for log, script in zip(logs, scripts)])
    output.write_text(text)
    print(f"wrote {output} ({len(text) / 1e3:,.0f} kB)")


if __name__ == "__main__":
    main()
