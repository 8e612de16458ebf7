"""What the scripts of this folder claim and measure: one line per claim on the terminal, everything in files for report.py.

Each script is a part, such as "memory", made of smaller ones. In the folder OUT (default: the current one) a part leaves PART.json with
its claims and PART.csv with its raw samples. Where only some of its smaller parts were run, those of the others stay as they were.
"""

import csv
import datetime
import json
import os
import pathlib
import subprocess
import sys
import time

import bed

OUT = pathlib.Path(os.environ.get("OUT", "."))
# Shorter measurements and fewer repeats, for when time on a GPU is dear.
QUICK = bool(os.environ.get("QUICK"))
WORDS = {True: "ok  ", False: "FAIL", None: "info"}

_part = None
# The smaller part that is being measured.
_of = None
_claims = []
_samples = []
_skipped = []
# When, how long and on what each smaller part was measured.
_runs = {}


def quick(short, full):
    """A duration or a number of repeats."""
    return short if QUICK else full


def claim(what, holds, measured="", key=None, **values):
    """A claim that holds (True), does not (False), or a figure that claims nothing (None).

    `key` names the row in the generated tables; `values` are its figures for them."""
    print(f"{WORDS[holds]}  {what}{': ' + measured if measured else ''}", flush=True)
    _claims.append({"of": _of, "what": what, "holds": holds, "measured": measured, "key": key, "values": values})


def sample(series, x, y):
    """One measured value of a series."""
    _samples.append((_of, series, x, y))


def skip(what, why):
    """Something that this host cannot show; never counted as shown."""
    print(f"skip  {what}: {why}", flush=True)
    _skipped.append({"of": _of, "what": what, "why": why})


def gpu_facts():
    """The GPUs and what they were doing: read, never set."""
    query = "name,driver_version,utilization.gpu,clocks.sm,clocks.max.sm,clocks.mem,power.limit,persistence_mode,mig.mode.current,clocks_event_reasons.active"
    lines = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
                           capture_output=True, text=True, check=False).stdout.splitlines()
    return [dict(zip(query.split(","), (field.strip() for field in line.split(",")))) for line in lines]


def before(names):
    """What an earlier run has left of smaller parts that this one has not measured: runs, claims, what was skipped, samples."""
    file = OUT / f"{_part}.json"
    if not file.exists():
        return {}, [], [], []
    old = json.loads(file.read_text())
    kept = {name: run for name, run in old["runs"].items() if name in names and name not in _runs}
    of_kept = lambda found: [one for one in found if one["of"] in kept]
    with open(OUT / f"{_part}.csv", newline="") as text:
        samples = [tuple(row) for row in csv.reader(text) if row[0] in kept]
    return kept, of_kept(old["claims"]), of_kept(old["skipped"]), samples


def finish(names):
    """Writes the part's files, its smaller parts in this order; returns the exit code."""
    failed = [found["what"] for found in _claims if found["holds"] is False]
    print(f"{len(_claims)} lines, {len(failed)} claims do not hold, {sum(run['seconds'] for run in _runs.values())} s", flush=True)
    OUT.mkdir(parents=True, exist_ok=True)
    runs, claims, skipped, samples = before(names)
    runs |= _runs
    ordered = lambda found, name: sorted(found, key=lambda one: names.index(name(one)))
    (OUT / f"{_part}.json").write_text(json.dumps({
        "part": _part, "gpus": gpu_facts(), "runs": {name: runs[name] for name in names if name in runs},
        "claims": ordered(claims + _claims, lambda one: one["of"]), "skipped": ordered(skipped + _skipped, lambda one: one["of"]),
    }, indent=1) + "\n")
    with open(OUT / f"{_part}.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("of", "series", "x", "y"))
        writer.writerows(ordered(samples + _samples, lambda one: one[0]))
    return 1 if failed else 0


def run(name, parts):
    """Runs the parts of a script that the command line names, or all; a part that breaks is a claim that does not hold."""
    global _part, _of
    wanted = sys.argv[1:] or list(parts)
    unknown = [word for word in wanted if word not in parts]
    if unknown:
        sys.exit(f"error: no part {unknown[0]!r}; there are {', '.join(parts)}")
    _part = name
    for _of in wanted:
        print(f"-- {name} {_of}", flush=True)
        began = time.monotonic()
        interrupted = False
        there = list(bed.OPEN)
        try:
            parts[_of]()
        except (Exception, SystemExit) as error:  # noqa: BLE001: the other parts shall be measured all the same
            claim(f"{name} {_of} could be measured", False, f"{type(error).__name__}: {error}")
            for left in [one for one in bed.OPEN if one not in there]:
                left.close()
        except KeyboardInterrupt:
            claim(f"{name} {_of} could be measured", False, "interrupted")
            interrupted = True
        _runs[_of] = {"date": datetime.date.today().isoformat(), "seconds": round(time.monotonic() - began), "quick": QUICK,
                      "kernel": os.uname().release}
        if interrupted:
            break
    sys.exit(finish(list(parts)))


def at(values, share):
    """The value below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def median(values):
    return at(values, 0.5)
