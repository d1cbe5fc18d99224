// Where the time went, as bars of phases.

// The colors of the phases that looplib has, in the order in which they are drawn; another one has that of "other".
const PHASE_COLORS = {
  train: 0,
  input: 1,
  evaluate: 2,
  save: 3,
  compile: 6,
  restore: 4,
  report: 5,
  start: "start",
  repeated: "repeated",
  off: "off",
  other: 7,
};

function timeOf(run) {
  if (!run.wall) return null;
  const rows = run.starts.length > 1 ? run.starts.map((start, index) => [`start ${index + 1}`, start.seconds]) : [];
  const longest = Math.max(...rows.map(([, seconds]) => total(seconds)));
  const life = total(run.life);
  return [
    timeBar("all", run.seconds, run.wall, 1),
    timeList(run.seconds, run.wall),
    life
      ? el(
          "div",
          {},
          el("h3", {}, "Since the first start"),
          el("p", {}, `${percent((run.life.train ?? 0) / life)} of ${duration(life)} became steps that the run has kept.`),
          timeBar("the life of the run", run.life, life, 1),
          timeList(run.life, life),
        )
      : null,
    overSteps(run),
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

/** The shares of the phases between reports as areas over the steps, and the memory. */
function overSteps(run) {
  const { spans } = run;
  if (spans.length < 2) return null;
  const steps = spans.map((span) => span.step);
  const ends = [0, ...steps]; // of each step in the areas, the first of which begins at step 0
  const sums = {};
  for (const span of spans) {
    for (const [phase, value] of Object.entries(span.seconds)) sums[phase] = (sums[phase] ?? 0) + value;
  }
  const lines = phasesOf(sums).map((phase) => ({
    label: phase,
    color: colorOf(phase),
    steps: ends,
    values: [spans[0], ...spans].map((span) => (span.seconds[phase] ?? 0) / (total(span.seconds) || 1)),
  }));
  const memory = [
    ["this process", "host_bytes", 0],
    ["device", "device_bytes", 1],
  ]
    .filter(([, name]) => spans.some((span) => span[name] !== null))
    .map(([label, name, index]) => ({ label, color: index, steps, values: spans.map((span) => span[name]) }));
  return el(
    "div",
    { class: "charts" },
    new Chart("share of the time", lines, run.marks, "", "shares").figure,
    memory.length ? new Chart("memory", memory, run.marks, "", "bytes").figure : null,
  );
}

function total(seconds) {
  return Object.entries(seconds).reduce((sum, [phase, value]) => sum + (phase === "wall" ? 0 : value), 0);
}

/** The phases of some seconds, those that the page has colors for in their order and then the others. */
function phasesOf(seconds) {
  const names = new Set([...Object.keys(PHASE_COLORS), ...Object.keys(seconds)]);
  return [...names].filter((phase) => phase !== "wall" && seconds[phase] > 0);
}

function colorOf(phase) {
  return Object.hasOwn(PHASE_COLORS, phase) ? PHASE_COLORS[phase] : PHASE_COLORS.other;
}

function timeBar(name, seconds, wall, width) {
  const parts = phasesOf(seconds);
  const text = parts.map((phase) => `${phase} ${percent(seconds[phase] / wall)}`).join(", ");
  const bar = el(
    "div",
    { class: "bar", role: "img", "aria-label": `Time of ${name}: ${text}` },
    parts.map((phase) => {
      const part = el("span", {
        class: `phase ${seriesOf(colorOf(phase))}`,
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
        swatch(colorOf(phase)),
        el("b", {}, phase),
        ` ${duration(seconds[phase])} · ${percent(seconds[phase] / wall)}`,
      ),
    ),
  );
}
