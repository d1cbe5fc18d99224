// Where the time went, as bars of phases.

const PHASES = ["train", "input", "evaluate", "save", "compile", "restore", "report", "start", "other"];

function timeOf(run) {
  if (!run.wall) return null;
  const rows = run.starts.length > 1 ? run.starts.map((start, index) => [`start ${index + 1}`, start.seconds]) : [];
  const longest = Math.max(...rows.map(([, seconds]) => total(seconds)));
  return [
    timeBar("all", run.seconds, run.wall, 1),
    timeList(run.seconds, run.wall),
    rows.length
      ? el(
          "div",
          { class: "starts" },
          el("h3", {}, "By start"),
          rows
            .slice(0, 50)
            .map(([name, seconds]) =>
              el(
                "div",
                { class: "row" },
                el("span", {}, name),
                timeBar(name, seconds, total(seconds), total(seconds) / longest),
                el("span", {}, duration(total(seconds))),
              ),
            ),
        )
      : null,
  ];
}

function total(seconds) {
  return Object.entries(seconds).reduce((sum, [phase, value]) => sum + (phase === "wall" ? 0 : value), 0);
}

/** The phases of some seconds, those that the page has colors for in their order and then the others. */
function phasesOf(seconds) {
  const known = PHASES.filter((phase) => seconds[phase] > 0);
  return [
    ...known,
    ...Object.keys(seconds).filter((phase) => phase !== "wall" && !PHASES.includes(phase) && seconds[phase] > 0),
  ];
}

function timeBar(name, seconds, wall, width) {
  const parts = phasesOf(seconds);
  const text = parts.map((phase) => `${phase} ${percent(seconds[phase] / wall)}`).join(", ");
  const bar = el(
    "div",
    { class: "bar", role: "img", "aria-label": `Time of ${name}: ${text}` },
    parts.map((phase) => {
      const part = el("span", {
        class: `phase ${PHASES.includes(phase) ? phase : "other"}`,
        title: `${phase}: ${duration(seconds[phase])} (${percent(seconds[phase] / wall)})`,
      });
      part.style.flexGrow = seconds[phase];
      return part;
    }),
  );
  bar.style.width = `${Math.max(2, 100 * width)}%`;
  return el("div", { class: "track" }, bar);
}

function timeList(seconds, wall) {
  const parts = phasesOf(seconds).toSorted((one, other) => seconds[other] - seconds[one]);
  return el(
    "ul",
    { class: "phases" },
    parts.map((phase) =>
      el(
        "li",
        {},
        el("span", { class: `swatch phase ${PHASES.includes(phase) ? phase : "other"}`, "aria-hidden": "true" }),
        el("b", {}, phase),
        ` ${duration(seconds[phase])} · ${percent(seconds[phase] / wall)}`,
      ),
    ),
  );
}
