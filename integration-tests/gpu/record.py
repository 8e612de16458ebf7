"""What the scripts of this folder claim and measure: one line per claim on the terminal, everything in files for report.py.

Each script is a part, such as "memory". In the folder OUT (default: the current one) a part leaves PART.json with its claims and
PART.csv with its raw samples.
"""

import csv
import datetime
import json
import os
import pathlib
import subprocess
import sys
import time

OUT = pathlib.Path(os.environ.get("OUT", "."))
# Shorter measurements and fewer repeats, for when time on a GPU is dear.
QUICK = bool(os.environ.get("QUICK"))
WORDS = {True: "ok  ", False: "FAIL", None: "info"}

_part = None
_claims = []
_samples = []
_skipped = []
_began = time.monotonic()


def quick(short, full):
    """A duration or a number of repeats."""
    return short if QUICK else full


def part(name):
    """Names the part that what follows belongs to."""
    global _part
    _part = name


def claim(what, holds, measured="", key=None, **values):
    """A claim that holds (True), does not (False), or a figure that claims nothing (None).

    `key` names the row in the generated tables; `values` are its figures for them."""
    print(f"{WORDS[holds]}  {what}{': ' + measured if measured else ''}", flush=True)
    _claims.append({"what": what, "holds": holds, "measured": measured, "key": key, "values": values})


def sample(series, x, y):
    """One measured value of a series."""
    _samples.append((series, x, y))


def skip(what, why):
    """Something that this host cannot show; never counted as shown."""
    print(f"skip  {what}: {why}", flush=True)
    _skipped.append({"what": what, "why": why})


def gpu_facts():
    """The GPUs and what they were doing: read, never set."""
    query = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,persistence_mode,mig.mode.current,clocks_event_reasons.active"
    lines = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
                           capture_output=True, text=True, check=False).stdout.splitlines()
    return [dict(zip(query.split(","), (field.strip() for field in line.split(",")))) for line in lines]


def finish():
    """Writes the part's files; returns the exit code."""
    failed = [found["what"] for found in _claims if found["holds"] is False]
    took = time.monotonic() - _began
    print(f"{len(_claims)} lines, {len(failed)} claims do not hold, {took:.0f} s", flush=True)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{_part}.json").write_text(json.dumps({
        "part": _part, "date": datetime.date.today().isoformat(), "quick": QUICK, "seconds": round(took), "gpus": gpu_facts(),
        "kernel": os.uname().release, "claims": _claims, "skipped": _skipped,
    }, indent=1) + "\n")
    with open(OUT / f"{_part}.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("series", "x", "y"))
        writer.writerows(_samples)
    return 1 if failed else 0


def run(name, parts):
    """Runs the parts of a script that the command line names, or all; a part that breaks is a claim that does not hold."""
    wanted = sys.argv[1:] or list(parts)
    unknown = [word for word in wanted if word not in parts]
    if unknown:
        sys.exit(f"error: no part {unknown[0]!r}; there are {', '.join(parts)}")
    part(name)
    for word in wanted:
        print(f"-- {name} {word}", flush=True)
        try:
            parts[word]()
        except (Exception, SystemExit) as error:  # noqa: BLE001: the other parts shall be measured all the same
            claim(f"{name} {word} could be measured", False, f"{type(error).__name__}: {error}")
        except KeyboardInterrupt:
            claim(f"{name} {word} could be measured", False, "interrupted")
            break
    sys.exit(finish())


def at(values, share):
    """The value below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def median(values):
    return at(values, 0.5)
