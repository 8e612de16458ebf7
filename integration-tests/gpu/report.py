"""Writes docs/benchmarks.md's part about real GPUs, and its plots, from the raw data that the other scripts left in OUT."""

import csv
import collections
import json
import os
import pathlib
import re

OUT = pathlib.Path(os.environ.get("OUT", "."))
DOCUMENT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- measured on a GPU: begin; written by integration-tests/gpu/report.py -->", "<!-- measured on a GPU: end -->"
PARTS = (
    ("memory", "Memory budgets"), ("paths", "Ways to allocate"), ("lifecycle", "Ends of processes and of the daemon"),
    ("launches", "Launch budgets"), ("collective", "A collective under a launch budget"), ("insight", "Leak finder"),
    ("profile", "Launch profile"), ("idle", "What leaves a GPU idle"), ("time", "GPU time"), ("tail", "A service beside a neighbour"),
    ("overhead", "What governed programs pay"), ("neighbours", "Bad neighbours"), ("control", "Control plane"),
    ("telemetry", "What is told"), ("hami", "Beside HAMi-core"),
)
# What throw-away prototypes had measured on an H200 before the product existed, and the rows that repeat it.
PROTOTYPES = (
    ("memory budget of 8 GiB: OutOfMemoryError after 7,424 MiB in blocks of 256 MiB", "memory/oom"),
    ("a refusal by status 0x51 is CUDA_ERROR_OUT_OF_MEMORY (2), one by 0x1b is CUDA_ERROR_NOT_PERMITTED (800)", ("path/cuMemAlloc", "path/managed/deny")),
    ("NVML shows 520 MiB right after a context was made (a program in C)", "memory/ledger"),
    ("launches held to 2,033 of 2,000/s, 20,033 of 20,000/s, 100,025 of 100,000/s, burst of 100 counted",
     ("rate/signal/2000/1", "rate/signal/20000/1", "rate/signal/100000/1")),
    ("a probe adds 0.45 to 2 us to a launch", "cost/launch"),
    ("a context makes 4 channel groups and 20 channels", "act/channels"),
    ("slices 1000 : 1000 give 50.0 : 50.0, sum 84 % of alone", ("share/short-50", "sum/short-50")),
    ("slices 1000 : 3000 give 25.0 : 75.0", "share/25:75"),
    ("slices 500 : 4500 give 10.0 : 90.0", "share/10:90"),
    ("slices of 300 : 2700 give 14.3 : 85.7, those under about 450 us are rounded up", "share/short-95"),
    ("default time slicing: 50 : 50, sum 84 % of alone", ("share/default", "sum/default")),
    ("slices of 2 and 18 ms: sum 99 % of alone", "round/20"),
    ("PyTorch matmul at 1500 : 3500: 29.5 : 70.5", "share/matmul"),
    ("PyTorch matmul at 500 : 4500: 9.0 : 91.0", "share/matmul/10:90"),
    ("MPS with 30 and 70 % of the threads: 29.4 : 70.6, sum 76 % of alone", ("share/mps", "sum/mps")),
    ("freezing takes 0.73 ms, thawing 0.42 ms", ("act/freeze", "act/thaw")),
    ("a frozen process that is killed is gone in 0.1 s, with its memory", "act/killed"),
    ("setting a slice takes 0.3 ms", "act/slice"),
    ("20 kernels of 25 us: p99 0.55 ms alone, 2.97 ms beside a saturating neighbour",
     ("latency/20 kernels of 25 us/alone", "latency/20 kernels of 25 us/default time slicing")),
    ("20 kernels of 25 us beside a frozen neighbour: p99 0.55 ms, as alone", "latency/20 kernels of 25 us/exclusive"),
    ("the same beside a neighbour of short slices: p99 1.07 ms", "latency/20 kernels of 25 us/weights 95:5 in a short round"),
    ("cuMemAlloc of 64 MiB under notification: 36 to 90 us", "overhead/cuMemAlloc and cuMemFree of 2 MiB/memory"),
    ("4 GiB of managed memory are moved to the host in 1.09 s, and faulted back in 0.51 s", "memory/reclaim"),
    ("an allocation that is told to retry (status 0x03) blocks until it is allowed", ("memory/wait", "memory/wait-timeout")),
    ("cuInit takes 106 ms, a context 133 ms", "start/1"),
    ("a process that was there first is found, and its channels obey", ("adopt/memory", "adopt/share")),
)


def anchor(key):
    return re.sub(r"[^a-z0-9]+", "-", key.lower()).strip("-")


def load():
    parts = {}
    for name, _ in PARTS:
        file = OUT / f"{name}.json"
        if file.exists():
            parts[name] = json.loads(file.read_text())
    return parts


def cell(text):
    return str(text).replace("|", "\\|")


def word(holds):
    return {True: "yes", False: "**no**", None: ""}[holds]


def measured(runs):
    """When the smaller parts were measured, and how."""
    groups = collections.defaultdict(list)
    for name, run in runs.items():
        groups[run["date"], run["quick"], run["kernel"]].append(name)
    told = []
    for (date, is_quick, kernel), names in groups.items():
        seconds = sum(runs[name]["seconds"] or 0 for name in names)
        told.append(f"{date}{f', {seconds} s' if seconds else ''}{', quick' if is_quick else ''}, kernel {kernel}"
                    + (f" ({', '.join(names)})" if len(groups) > 1 else ""))
    return "; ".join(told)


def section(title, part):
    gpus = part["gpus"]
    lines = [f"### {title}", ""]
    if not part["claims"]:
        return lines
    lines += [f"{measured(part['runs'])}; {gpus[0]['name'] if gpus else 'GPU unknown'}"
              f"{f' ({len(gpus)} of them in the host)' if len(gpus) > 1 else ''}, driver {gpus[0]['driver_version'] if gpus else 'unknown'}; "
              f"raw data: [{part['part']}.json](benchmarks/{part['part']}.json), "
              f"[{part['part']}.csv](benchmarks/{part['part']}.csv)", "",
              "| claim or question | measured | holds |", "|---|---|---|"]
    for found in part["claims"]:
        mark = f'<a id="{anchor(found["key"])}"></a>' if found["key"] else ""
        lines.append(f"| {mark}{cell(found['what'])} | {cell(found['measured'])} | {word(found['holds'])} |")
    return [*lines, ""]


def beside_prototypes(rows):
    lines = ["### Beside the prototypes", "",
             "What throw-away programs had measured before, and what the product does. A row of the product that is missing was not measured.", "",
             "| prototype | product |", "|---|---|"]
    for what, keys in PROTOTYPES:
        keys = (keys,) if isinstance(keys, str) else keys
        told = "; ".join(f"[{cell(rows[key]['measured'])}](#{anchor(key)})" for key in keys if key in rows)
        lines.append(f"| {what} | {told or 'not measured'} |")
    return [*lines, ""]


def shortcomings(parts):
    lines = ["### What did not hold, and what was not measured", ""]
    for name, title in PARTS:
        part = parts.get(name)
        if part is None:
            lines.append(f"- {title}: not measured.")
            continue
        lines += [f"- {title}: {found['what']}: {found['measured'] or 'no'}." for found in part["claims"] if found["holds"] is False]
        lines += [f"- {title}: {found['what']} was skipped: {found['why']}." for found in part["skipped"]]
    return [*lines, ""] if len(lines) > 2 else [*lines, "Everything held.", ""]


def series(name):
    found = collections.defaultdict(list)
    file = OUT / f"{name}.csv"
    if file.exists():
        with open(file, newline="") as text:
            for row in csv.DictReader(text):
                found[row["series"]].append((float(row["x"]), float(row["y"])))
    return found


def plots():
    """Draws what there is data for; returns the lines that show it."""
    try:
        import matplotlib
    except ImportError:
        print("skip  plots: Python has no matplotlib")
        return []
    matplotlib.use("svg")
    # Two runs over the same data give the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "gpuquota", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    drawn = []

    def draw(file, title, alt, plot, data, **labels):
        if not data:
            return
        figure, axes = pyplot.subplots(figsize=(7, 3.5))
        plot(axes, data)
        axes.set(title=title, **labels)
        axes.grid(alpha=0.3)
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend(fontsize=8)
        figure.tight_layout()
        figure.savefig(OUT / file, metadata={"Date": None})
        pyplot.close(figure)
        drawn.extend([f"![{alt}](benchmarks/{file})", ""])

    time = series("time")

    def over_time(axes, tests):
        for test in tests:
            first, second = time[f"{test}/0"], time[f"{test}/1"]
            axes.plot([x for x, _ in first], [100 * a / ((a + b) or 1) for (_, a), (_, b) in zip(first, second)], marker=".", label=test)
        axes.set_ylim(0, 100)

    draw("shares.svg", "Share of the first of two tenants, by second", "Shares over time", over_time,
         sorted({name.rsplit("/", 1)[0] for name in time if name.endswith("/1") and name.startswith(("weights", "default", "MPS"))}),
         xlabel="s", ylabel="% of the GPU")

    def cdf(axes, systems):
        for name in systems:
            values = sorted(y for _, y in tail[name])
            axes.plot(values, [100 * (at + 1) / len(values) for at in range(len(values))], label=name.rsplit("/", 1)[0])
        axes.set_xscale("log")

    tail = series("tail")
    for load in sorted({name.rsplit("/", 1)[1] for name in tail}):
        draw(f"tail-{load}.svg", f"Latency of a service at {float(load):.0%} of its peak", "Distribution of latencies", cdf,
             [name for name in tail if name.endswith(f"/{load}")], xlabel="ms from arrival to end", ylabel="% of requests")

    def line(axes, values):
        axes.plot([x for x, _ in values], [y for _, y in values], marker="o")

    draw("rounds.svg", "Work of two tenants together, by length of the round", "Throughput by round", line, time.get("sum by round"),
         xlabel="time.round, ms", ylabel="% of one tenant alone")
    draw("limits.svg", "Usable part of a memory budget", "Accuracy by limit", line, series("memory").get("usable"),
         xlabel="memory.max, GiB", ylabel="% of it that could be had")
    return drawn


def main():
    parts = load()
    rows = {found["key"]: found for part in parts.values() for found in part["claims"] if found["key"]}
    lines = [BEGIN, "## On a GPU", "",
             "One command repeats this: `integration-tests/gpu/run.sh`. Clocks, power limits and MIG are read, never set.", ""]
    lines += plots() + beside_prototypes(rows) + shortcomings(parts)
    for name, title in PARTS:
        if name in parts:
            lines += section(title, parts[name])
    lines.append(END)
    text = DOCUMENT.read_text()
    if BEGIN not in text or END not in text:
        raise SystemExit(f"error: {DOCUMENT} has no lines '{BEGIN}' and '{END}' to write between")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    DOCUMENT.write_text(before + "\n".join(lines) + after)
    print(f"wrote {DOCUMENT.relative_to(DOCUMENT.parents[1])} and its plots from {len(rows)} rows")


main()
