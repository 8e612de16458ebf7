#!/usr/bin/env python3
"""Draws the panels of the Grafana dashboard from the data of a running Prometheus.

Not Grafana: a plain plot of what each panel's queries answer, at its place in the grid, so that a change of the dashboard can be
looked at where there is no Grafana.

usage: render-dashboard.py PROMETHEUS-URL DASHBOARD.json SECONDS OUT.png
"""

import json
import re
import sys
import time
import urllib.parse
import urllib.request

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def ask(url, path, **parameters):
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}") as answer:
        return json.load(answer)["data"]["result"]


def chosen(expression):
    """The expression with every choice of the dashboard set to "all"."""
    expression = expression.replace("$__rate_interval", "10s")
    return re.sub(r"\$(instance|tenant|gpu)", ".*", expression)


def legend(target, labels):
    text = target.get("legendFormat", "")
    return re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match.group(1), ""), text) or labels.get("tenant", "")


SCALE = {"bytes": (1 << 30, "GiB"), "percentunit": (0.01, "%"), "ops": (1, "/s"), "s": (1, "s"), "short": (1, "")}


def draw(axes, panel, url, start, end):
    axes.set_title(panel["title"], fontsize=8, loc="left", color="#dddddd")
    axes.set_facecolor("#181b1f")
    axes.tick_params(labelsize=6, colors="#999999")
    for spine in axes.spines.values():
        spine.set_color("#333333")
    divisor, unit = SCALE.get(panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "short"), (1, ""))
    if panel["type"] == "stat":
        result = ask(url, "query", query=chosen(panel["targets"][0]["expr"]), time=end)
        text = f"{float(result[0]['value'][1]) / divisor:.3g}{unit}" if result else "no data"
        axes.text(0.5, 0.45, text, ha="center", va="center", fontsize=20, color="#73bf69")
        axes.set_xticks([])
        axes.set_yticks([])
        return
    if panel["type"] == "bargauge":
        result = [
            (legend(panel["targets"][0], one["metric"]), float(one["value"][1]) / divisor)
            for one in ask(url, "query", query=chosen(panel["targets"][0]["expr"]), time=end)
        ]
        result = [(name, value) for name, value in result if value == value and value != float("inf")]
        axes.barh([name for name, _ in result], [value for _, value in result], color="#73bf69")
        axes.set_xlim(0, 100)
        return
    for target in panel["targets"]:
        for one in ask(url, "query_range", query=chosen(target["expr"]), start=start, end=end, step=1):
            points = [(float(at) - end, float(value) / divisor) for at, value in one["values"]]
            axes.plot(*zip(*points), linewidth=1, label=legend(target, one["metric"]))
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    axes.set_ylabel(unit, fontsize=6, color="#999999")
    axes.grid(color="#2a2d32", linewidth=0.5)
    if 0 < len(axes.lines) <= 12:
        axes.legend(fontsize=5, loc="upper left", frameon=False, labelcolor="#bbbbbb", ncol=2)


def main():
    url, dashboard, seconds, out = sys.argv[1:]
    with open(dashboard, encoding="utf-8") as file:
        panels = json.load(file)["panels"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = plt.figure(figsize=(14, height * 0.32), facecolor="#111217")
    end = time.time()
    for panel in panels:
        at = panel["gridPos"]
        axes = figure.add_axes(
            (
                (at["x"] + 0.9) / 24.4,
                1 - (at["y"] + at["h"] - 0.9) / height,
                (at["w"] - 1.4) / 24.4,
                (at["h"] - 2.2) / height,
            )
        )
        draw(axes, panel, url, end - float(seconds), end)
    figure.savefig(out, dpi=90, facecolor=figure.get_facecolor())


main()
