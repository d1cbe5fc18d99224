"""A picture of the ratios: a bar each, its quartiles, and its target."""

import re

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

_COLOURS = {True: "tab:green", False: "tab:red", None: "tab:gray"}
_MOST = 4.0  # a longer bar is cut, and says how long it is


def draw(records, path):
    """Draws records with one panel for each workload of looplib's default row.

    Args:
      records: list of records.
      path: where to write the picture.
    """
    panels = {}
    for entry in records:
        name, _, row = entry["workload"].partition(", ")
        if name == "W10":
            panels.setdefault("W10", []).append((f"{row}, guards off", entry))
        elif not row or entry["target"]:
            panels.setdefault(name, []).append((f"{row + ' / ' if row else ''}{entry['against']}", entry))
    panels = dict(sorted(panels.items(), key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])]))
    heights = [len(bars) + 1 for bars in panels.values()]
    figure, axes = pyplot.subplots(
        len(panels), figsize=(9, 0.26 * sum(heights) + 1), sharex=True, squeeze=False, height_ratios=heights
    )
    for axis, (name, bars) in zip(axes[:, 0], panels.items()):
        _panel(axis, name, bars)
    axes[0, 0].set_title("looplib's speed over its peers': median and quartiles; the black mark is the target")
    axes[-1, 0].set_xlabel("ratio: above 1, looplib is faster (green: target met, red: not met, gray: none set)")
    figure.tight_layout(h_pad=0.2)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axis, name, bars):
    for place, (_, entry) in enumerate(bars):
        ratio, low, high = (min(entry[key], _MOST) for key in ("ratio", "low", "high"))
        spread = [[max(0, ratio - low)], [max(0, high - ratio)]]
        axis.barh(place, ratio, xerr=spread, color=_COLOURS[entry["met"]], height=0.7, ecolor="dimgray", capsize=2)
        end = max(ratio, high, entry["target"] or 0)
        axis.text(end + 0.04, place, f"{entry['ratio']:.2f}", va="center", fontsize=8)
        if entry["target"]:
            axis.plot([entry["target"]] * 2, [place - 0.45, place + 0.45], color="black", linewidth=2.5)
    axis.axvline(1, color="black", linewidth=0.8, linestyle="--")
    axis.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=8)
    axis.set_ylabel(name, rotation=0, ha="right", va="center", fontweight="bold")
    axis.set_ylim(len(bars) - 0.4, -0.6)
    axis.set_xlim(0, _MOST + 0.4)
