"""The page of one run, or of several side by side, as one HTML file that needs no network."""

import base64
import dataclasses
import datetime
import functools
import hashlib
import html
import importlib.resources
import json
import os
import re
import string
from collections.abc import Iterator, Sequence
from typing import Any

from looplib.base import files
from looplib.base.console import printable
from looplib.report.page import curves
from looplib.report.page.content import Run, not_shown, read_run
from looplib.report.page.verdict import findings
from looplib.run.directory import PAGE
from looplib.run.metric_names import best_first
from looplib.run.report import strict_json
from looplib.run.sweep_results import SweepResults

_SCRIPTS = (
    "uPlot.iife.min.js", "format.js", "tables.js", "marks.js", "equal.js", "charts.js", "controls.js", "time.js",
    "samples.js", "sections.js", "run.js", "compare.js", "main.js",
)  # fmt: skip
_STYLES = ("uPlot.min.css", "page.css")
_OF_THE_REPORT = ("started", "error", "verdict", "strategy", "rollbacks", "traceback", "versions")  # on the page too
_MOST_POINTS = 80_000  # of all curves of a page
_MOST_POINTS_OF_A_CURVE = 2000
_REVERSING = re.compile(r"(?<!\\)((?:\\\\)*)\\u(202[a-e]|206[6-9])")  # as JSON has them


@dataclasses.dataclass(frozen=True)
class HtmlPage:
    """A page that was written; a notebook shows it below the cell that ends with it.

    Attributes:
      path: the file.
    """

    path: str

    def _repr_html_(self) -> str:
        # As an attribute, because no address of the file works in all notebooks.
        page = html.escape(files.read_text(self.path, most=1 << 28))
        return f'<iframe srcdoc="{page}" sandbox="allow-scripts" width="100%" height="600" style="border: 0"></iframe>'


def write_of_run(directory: str) -> HtmlPage:
    """Writes the page of a run into its directory, and returns it.

    Args:
      directory: the run directory.

    Raises:
      OSError, tf.errors.OpError: if it cannot be written.
    """
    name = os.path.basename(os.path.normpath(directory))
    path = os.path.join(directory, PAGE)
    files.write_whole(path, page([read_run(directory, name)], name))
    return HtmlPage(path)


def page(
    runs: Sequence[Run], title: str, written: datetime.datetime | None = None, sweep: SweepResults | None = None
) -> str:
    """Returns the page as HTML.

    What comes from the runs is in it as JSON, which the page's script puts into the document as text. A
    Content-Security-Policy lets no other script run.

    Args:
      runs: one run, or several to be compared.
      title: of the page.
      written: when the page says that it was written; default now.
      sweep: what the sweep has found that the runs are of; None for other runs.
    """
    assets = importlib.resources.files(__package__) / "assets"
    style, script = _style(), _script()
    written = written or datetime.datetime.now(datetime.timezone.utc)
    head = {"title": title, "written": written.isoformat(timespec="seconds"), "leaders": _leaders(runs, sweep)}
    data = _json({**head, "sweep": strict_json(sweep)})
    return string.Template((assets / "page.html").read_text("utf-8")).substitute(
        policy=policy_of([style], [script]),
        title=html.escape(printable(title)),
        style=style,
        script=script,
        data=f'{data[:-1]},"runs":[{",".join(_drawn(runs))}]}}',
    )


def policy_of(styles: Sequence[str], scripts: Sequence[str], more: str = "") -> str:
    """Returns a Content-Security-Policy that lets these styles and scripts run, and what `more` says."""
    return (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {' '.join(map(_hash, styles))}; "
        f"img-src data:; {more}base-uri 'none'; form-action 'none'"
    )


def shell_of(names: Sequence[str], title: str, **settings: str) -> tuple[str, str]:
    """Returns a page that holds the page of the runs in a frame, and its policy, which the frame inherits.

    Args:
      names: of its template, style and script in `assets/`.
      title: of the page.
      **settings: what stands for names in its script.
    """
    template, style, script = (_joined([name]) for name in names)
    script = string.Template(script).substitute(settings)
    text = string.Template(template).substitute(title=html.escape(printable(title)), style=style, script=script)
    return text, policy_of([style, _style()], [script, _script()], "connect-src 'self'; ")


@functools.cache
def _style() -> str:
    return _joined(_STYLES)


@functools.cache
def _script() -> str:
    return _joined(_SCRIPTS)


def _joined(names: Sequence[str]) -> str:
    assets = importlib.resources.files(__package__) / "assets"
    return "\n".join((assets / name).read_text("utf-8") for name in names)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(data: Any) -> str:
    """Returns JSON that can stand in a script element: nothing in it ends the element or starts a comment.

    Characters that reverse the text after them (Unicode's bidirectional controls) are shown as escapes.
    """
    text = json.dumps(data, default=vars, allow_nan=False, separators=(",", ":"))  # of a dataclass, its fields
    return _REVERSING.sub(r"\1\\\\u\2", text).replace("<", "\\u003c")


def _drawn(runs: Sequence[Run]) -> Iterator[str]:
    """Yields what the scripts in `assets/` read, as JSON: the fields of each `Run`, thinned curves and its findings."""
    count = sum(len(run.curves) for run in runs)
    most = min(_MOST_POINTS_OF_A_CURVE, _MOST_POINTS // max(count, 1))
    for run in runs:
        try:
            yield _json(_of_run(run, most, whole=len(runs) == 1))
        except Exception as error:  # one run takes no page from the others
            yield _json(_of_run(not_shown(run.directory, run.name, error), most, whole=True))


def _leaders(runs: Sequence[Run], sweep: SweepResults | None) -> dict[str, dict[str, Any]]:
    """Returns the mode of each metric that has one, by its name, and the numbers of the runs that end best by it.

    There are none if all runs are equal.
    """
    ends: dict[str, dict[int, float]] = {}
    modes: dict[str, str] = {}
    compared, goal = (sweep.compared.removeprefix("best "), sweep.goal) if sweep else ("", "")
    for place, run in enumerate(runs):
        for curve in run.curves:
            mode = goal if f"{curve.split}/{curve.name}" == compared else run.mode(curve)
            if not curve.undone and mode:
                name = f"{curve.split} {curve.name}"
                ends.setdefault(name, {})[place] = curve.values[-1]
                modes.setdefault(name, mode)
    found = {}
    for name, values in ends.items():
        best = best_first(values.values(), lambda value: value, modes[name])[:1]
        places = [place for place, value in values.items() if value in best]
        found[name] = {"mode": modes[name], "runs": places if len(places) < len(values) else []}
    return found


def _of_run(run: Run, most: int, whole: bool) -> dict[str, Any]:
    shown = [curves.draw(curve, most, run.mode(curve)) for curve in run.curves if whole or not curve.undone]
    fields = {**vars(run), **{name: vars(run.report)[name] for name in _OF_THE_REPORT}}
    del fields["report"]
    return {**fields, "curves": shown, "findings": findings(run, alone=whole)}
