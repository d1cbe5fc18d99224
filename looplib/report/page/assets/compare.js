// The page of several runs side by side.

function comparePage(title, runs) {
  const named = runs.map((run, index) => ({ ...run, index }));
  if (report.sweep) named.sort((one, other) => rankOf(one) - rankOf(other));
  const sections = [
    report.sweep && section("sweep", "Sweep", sweepResult(named.find((run) => rankOf(run) === 0))),
    section("runs", "Runs", runTable(named)),
    section("curves", "Curves", comparedCurves(named)),
    section("time", "Time", comparedTime(named)),
    section(
      "verdict",
      "Verdicts",
      named
        .filter((run) => run.error || run.findings.length || run.notes.length)
        .map((run) => comparedVerdict(run, runs.length <= 4 || run.status === "failed")),
    ),
  ];
  return page(title, el("span", { class: "badge note" }, `${runs.length} runs`), directoriesOf(runs), sections);
}

/** The place of a run's trial in the sweep, from 0 for the best. */
function rankOf(run) {
  const place = report.sweep.trials.findIndex((trial) => trial.name === run.name.split("/")[0]);
  return place < 0 ? report.sweep.trials.length : place;
}

/** What the runs are compared by, the best of them, and which settings mattered. */
function sweepResult(best) {
  const { compared, goal, importances, note, trials } = report.sweep;
  const value = trials[0]?.value ?? null;
  const names = Object.keys(importances);
  const better = goal === "min" ? "lower" : "higher";
  const settings = names.map((name) => `${name}=${best?.settings[name] ?? "?"}`).join(" ");
  return [
    el(
      "p",
      {},
      value === null
        ? `No trial has a result yet (${compared}).`
        : `${trials[0].name} is the best of ${trials.length} trials: ${compared} ${number(value)}, ${better} is better${settings && `; ${settings}`}`,
    ),
    names.length
      ? table(
          "Which settings mattered",
          [{ name: "Setting" }, { name: "How much it mattered" }, { name: "", numeric: true }],
          names.map((name) => [
            { value: name, shown: el("code", {}, name) },
            { value: name, shown: el("meter", { min: 0, max: 1, value: importances[name], "aria-label": name }) },
            { value: importances[name], shown: percent(importances[name]) },
          ]),
        )
      : note && el("p", { class: "note" }, `${note[0].toUpperCase()}${note.slice(1)}.`),
  ];
}

/** The directories of the runs and their commits, as facts. */
function directoriesOf(runs) {
  const few = runs.slice(0, 4).map((run) => {
    const commit = run.program.commit ? ` (commit ${run.program.commit.slice(0, 8)})` : "";
    return `${run.directory}${commit}`;
  });
  return runs.length > 4 ? [...few, `and ${runs.length - 4} more`] : few;
}

/** The table of all runs: the settings that differ, and what they ended with. A click on a head sorts it. */
function runTable(runs) {
  const ofTrials = report.sweep && !runs.some((run) => run.name.includes("/")); // and not of their seeds
  const metrics = metricsOf(runs).filter((name) => !ofTrials || name.replace(" ", "/") !== report.sweep.compared);
  const differing = differingSettings(runs);
  const columns = [
    { name: "Run" },
    { name: "Ended" },
    ...(report.sweep ? [{ name: report.sweep.compared, numeric: true, lessFirst: report.sweep.goal === "min" }] : []),
    ...differing.map((name) => ({ name, numeric: runs.every((run) => isNumber(run.settings[name] ?? 0)) })),
    ...metrics.map((metric) => ({ name: metric, numeric: true, lessFirst: report.leaders[metric]?.mode === "min" })),
    { name: "Step", numeric: true },
    { name: "Time", numeric: true },
    { name: "Steps a second", numeric: true },
    { name: "Restarts", numeric: true },
  ];
  const rows = runs.map((run) => {
    const values = metrics.map((metric) => ({ value: lastOf(run, metric), shown: metricCell(run, metric) }));
    const own = differing.map((name) => {
      const text = run.settings[name];
      return {
        value: isNumber(text) ? Number(text) : (text ?? null),
        shown: text === undefined ? "–" : el("code", {}, text),
      };
    });
    const rate = lastOf(run, "train steps_per_second");
    const restarts = restartsOf(run);
    return [
      { value: run.name, shown: toggle(run) },
      { value: run.status, shown: badge(run.status) },
      ...(report.sweep ? [sweepCell(run)] : []),
      ...own,
      ...values,
      { value: run.step, shown: number(run.step) + (run.final_step === null ? "" : ` (back at ${number(run.final_step)})`) },
      { value: run.wall || null, shown: duration(run.wall || null) },
      { value: rate, shown: number(rate) },
      { value: restarts, shown: number(restarts) },
    ];
  });
  return [
    el(
      "p",
      { class: "note" },
      "The best final value of each metric is bold. Columns sort by a click; a run's box shows or hides its curves.",
    ),
    table("All runs", columns, rows, { sortable: true }),
  ];
}

function sweepCell(run) {
  const { trials } = report.sweep;
  const value = trials[rankOf(run)]?.value ?? null;
  const leads = value !== null && value === trials[0].value && trials.some((trial) => trial.value !== value);
  return { value, shown: el(leads ? "b" : "span", {}, number(value)) };
}

function isNumber(text) {
  return text !== undefined && text !== "" && Number.isFinite(Number(text));
}

function metricsOf(runs) {
  const all = runs.flatMap((run) => run.curves.filter((curve) => curve.last && kindOf(curve.name) === "Metrics"));
  const names = [
    ...new Set(
      all
        .toSorted((one, other) => Number(one.split === "train") - Number(other.split === "train"))
        .map((curve) => `${curve.split} ${curve.name}`),
    ),
  ];
  return names.slice(0, 8);
}

/** The final value of a metric; null for none, or one that is not finite. */
function lastOf(run, metric) {
  const curve = run.curves.find((one) => `${one.split} ${one.name}` === metric);
  return curve && curve.values.at(-1) !== null ? (curve.last?.value ?? null) : null;
}

function metricCell(run, metric) {
  return el(report.leaders[metric]?.runs.includes(run.index) ? "b" : "span", {}, number(lastOf(run, metric)));
}

/** The names of the settings that are not the same in all runs whose settings are known, apart from directories. */
function differingSettings(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))];
  const knows = (run, name) => run.starts.length || name in run.settings; // a trial without a start has few settings
  const differ = (name) => new Set(runs.filter((run) => knows(run, name)).map((run) => run.settings[name])).size > 1;
  return names.filter((name) => name !== "model_dir" && differ(name)).slice(0, 20);
}

/** The box of a run that shows and hides its curves. */
function toggle(run) {
  const change = (event) => {
    view.hidden[event.target.checked ? "delete" : "add"](run.index);
    redraw();
  };
  return el(
    "label",
    { class: "run" },
    el("input", { type: "checkbox", checked: !view.hidden.has(run.index), change }),
    swatch(run.index),
    el("bdi", {}, run.name),
  );
}

function comparedCurves(runs) {
  const curves = new Map();
  for (const run of runs) {
    for (const curve of run.curves) {
      const name = `${curve.split} ${curve.name}`;
      curves.set(name, [
        ...(curves.get(name) ?? []),
        { ...lineOf(curve, run.name, run.index), group: run.index, points: curve.points <= 12 },
      ]);
    }
  }
  const names = [...new Set(runs.flatMap((run) => run.curves.map((curve) => curve.name)))];
  const groups = grouped(names, (name) =>
    [...curves.keys()]
      .filter((full) => full.slice(full.indexOf(" ") + 1) === name)
      .map((full) => new Chart(full, curves.get(full)).figure),
  );
  return groups.length ? [controls(), ...groups] : null;
}

function comparedTime(all) {
  const runs = all.filter((run) => run.wall);
  const longest = Math.max(...runs.map((run) => run.wall));
  if (!(longest > 0)) return null;
  const sum = {};
  for (const run of runs)
    for (const [phase, seconds] of Object.entries(run.seconds)) sum[phase] = (sum[phase] ?? 0) + seconds;
  return [
    el(
      "div",
      { class: "starts" },
      runs.map((run) =>
        el(
          "div",
          { class: "row" },
          el("bdi", {}, run.name),
          timeBar(run.name, run.seconds, run.wall, run.wall / longest),
          el("span", {}, duration(run.wall)),
        ),
      ),
    ),
    el("p", { class: "note" }, "Times of all runs together:"),
    timeList(sum, total(sum)),
  ];
}

function comparedVerdict(run, open) {
  const make = () => [failure(run), verdict(run)].filter(Boolean);
  return folded(run.name, () => el("div", {}, make()), open);
}
