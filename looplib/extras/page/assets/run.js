// The page of one run.

const PHASES = ["train", "input", "evaluate", "save", "compile", "restore", "report", "start", "other"];
const FEW = 12; // charts of a kind that are not folded
const ENDED = { done: "good", failed: "bad", killed: "bad", preempted: "note", running: "note" };

function runPage(run) {
  const sections = [
    section("verdict", "Verdict", failure(run), verdict(run)),
    section("curves", "Curves", curves(run)),
    section("time", "Time", timeOf(run)),
    section("samples", "Samples", samples(run.samples)),
    section("profile", "Profile", profile(run)),
    section("checkpoints", "Checkpoints", checkpointTable(run)),
    section("model", "Model", modelTable(run)),
    section("settings", "Settings", settings(run)),
    section("history", "History", history(run)),
  ];
  const facts = [run.strategy, run.started && `started ${time(run.started)}`, run.wall && `took ${duration(run.wall)}`];
  return page(run.name, badge(run.status), facts, [tiles(run), ...sections]);
}

/** The frame of a page: name, facts, links to the sections, and the sections. */
function page(title, mark, facts, content) {
  const kept = content.filter(Boolean);
  const links = kept.filter((one) => one.id).map((one) => el("a", { href: `#${one.id}` }, one.querySelector("h2").textContent));
  return [
    el(
      "header",
      {},
      el("h1", {}, el("bdi", {}, title), " ", mark),
      el("p", { class: "facts" }, facts.filter(Boolean).map((fact) => el("span", {}, fact))),
      el("nav", { "aria-label": "Sections" }, links),
    ),
    el("main", {}, kept),
    el("footer", {}, `Written by looplib, ${time(report.written)}.`),
  ];
}

function badge(status) {
  return el("span", { class: `badge ${ENDED[status] ?? "note"}` }, status || "unknown");
}

/** The numbers that one looks for first. */
function tiles(run) {
  const drawn = run.curves.filter((curve) => !curve.undone && curve.last);
  const tile = (name, value, detail) => el("div", { class: "tile" }, el("span", {}, name), el("b", {}, value), el("small", {}, detail));
  const metrics = drawn
    .filter((curve) => kindOf(curve.name) === "Metrics")
    .toSorted((one, other) => Number(one.split === "train") - Number(other.split === "train"))
    .slice(0, 4)
    .map((curve) => {
      const best = bestOf(curve, run);
      const detail = best && best.step !== curve.last.step ? `best ${number(best.value)} at step ${number(best.step)}` : `at step ${number(curve.last.step)}`;
      return tile(`${curve.split} ${curve.name}`, number(curve.last.value), detail);
    });
  const rate = drawn.find((curve) => curve.name === "steps_per_second");
  const count = run.starts.length - 1;
  return el(
    "div",
    { class: "tiles" },
    metrics,
    run.step === null ? null : tile("steps", number(run.step), count > 0 ? `${number(count)} restart${count === 1 ? "" : "s"}${run.rollbacks ? `, ${run.rollbacks} rollback${run.rollbacks === 1 ? "" : "s"}` : ""}` : run.rollbacks ? `${run.rollbacks} rollbacks` : "without a restart"),
    rate ? tile("steps a second", number(median(rate.values)), "median") : null,
    run.wall ? tile("time", duration(run.wall), `${percent((run.seconds.train ?? 0) / run.wall)} training`) : null,
    run.totals.parameters === undefined ? null : tile("parameters", compact(run.totals.parameters), number(run.totals.parameters)),
  );
}

function median(values) {
  const sorted = values.filter((value) => value !== null).toSorted((one, other) => one - other);
  return sorted[Math.floor(sorted.length / 2)];
}

/** The best value of a curve: the lowest of a loss or an error; null if the name does not say which is better. */
function bestOf(curve, run) {
  if (`${curve.split}/${curve.name}` === run.best_metric) return run.best_mode === "max" ? curve.highest : curve.lowest;
  if (/loss|error|perplexity/.test(curve.name)) return curve.lowest;
  return /acc|auc|f1|precision|recall|bleu/.test(curve.name) ? curve.highest : null;
}

function failure(run) {
  if (!run.error) return null;
  return el("div", { class: "failure", role: "note", "aria-label": "Error" }, el("b", {}, "Error"), el("pre", {}, run.error));
}

function verdict(run) {
  const all = [...run.findings, ...run.notes.map((text) => ({ kind: "note", text, advice: "" }))];
  const words = { good: "✓", note: "!", bad: "✗" };
  const items = all.map(({ kind, text, advice }) =>
    el("li", { class: kind }, el("span", { class: "sign", "aria-hidden": "true" }, words[kind]), el("div", {}, text, advice ? el("span", { class: "advice" }, ` ${advice}`) : "")),
  );
  return items.length ? el("ul", { class: "findings" }, items) : null;
}

// Curves.

function kindOf(name) {
  if (name === "epoch" || name === "examples") return null;
  if (/per_second$|share_of_peak$/.test(name)) return "Speed";
  if (/^(learning_rate|gradient_norm|weight_norm|update_norm|loss_scale|skipped_steps)$/.test(name)) return "Optimization";
  return name.includes("/") ? name.slice(0, name.indexOf("/")) : "Metrics";
}

function curves(run) {
  const splits = [...new Set(run.curves.map((curve) => curve.split))];
  const lines = (name) =>
    run.curves
      .filter((curve) => curve.name === name)
      .toSorted((one, other) => Number(other.undone) - Number(one.undone))
      .map((curve) => lineOf(curve, curve.split, splits.indexOf(curve.split)));
  const names = new Set(run.curves.map((curve) => curve.name));
  const note = (name) => {
    const bad = run.curves.filter((curve) => curve.name === name && curve.bad && !curve.undone);
    return bad.map((curve) => `${curve.split}: ${number(curve.bad)} value${curve.bad === 1 ? "" : "s"} not finite, first at step ${number(curve.bad_steps[0])}.`).join(" ");
  };
  const groups = grouped([...names], (name) => new Chart(name, lines(name), run.marks, note(name)).figure);
  return groups.length ? [controls(), marksKey(run), ...groups] : null;
}

function lineOf(curve, label, index) {
  return { label, steps: curve.steps, values: curve.values, color: index, points: curve.points <= 40, undone: curve.undone };
}

/** Charts in a grid, those of the loss first; kinds of many charts, such as the norms of each layer, are folded. */
function grouped(names, chart) {
  const kinds = new Map([["Metrics", []], ["Optimization", []], ["Speed", []]]);
  for (const name of names) {
    const kind = kindOf(name);
    if (kind) kinds.set(kind, [...(kinds.get(kind) ?? []), name]);
  }
  const first = (name) => (name === "loss" ? 0 : 1);
  const grid = (own) => el("div", { class: "charts" }, own.toSorted((one, other) => first(one) - first(other)).map(chart));
  const few = [...kinds.values()].filter((own) => own.length <= FEW).flat();
  const many = [...kinds].filter(([, own]) => own.length > FEW);
  return [few.length ? grid(few) : null, ...many.map(([kind, own]) => folded(`${kind} (${own.length} charts)`, () => grid(own)))].filter(Boolean);
}

function marksKey(run) {
  const names = { restart: "restart", rollback: "rollback", skipped: "skipped steps", best: "best checkpoint" };
  const kinds = Object.keys(names).filter((kind) => run.marks.some((mark) => mark.kind === kind));
  const undone = run.curves.some((curve) => curve.undone);
  if (!kinds.length && !undone) return null;
  const items = kinds.map((kind) => el("span", { class: `mark ${kind}` }, el("span", { "aria-hidden": "true" }, SIGNS[kind]), ` ${names[kind]}`));
  return el("p", { class: "key" }, items, undone ? el("span", {}, el("span", { class: "dotted", "aria-hidden": "true" }), " taken back") : null);
}

// Time.

function timeOf(run) {
  if (!run.wall) return null;
  const rows = run.starts.length > 1 ? run.starts.map((start, index) => [`start ${index + 1}`, start.seconds]) : [];
  const longest = Math.max(...rows.map(([, seconds]) => total(seconds)));
  return [
    timeBar("all", run.seconds, run.wall, 1),
    timeList(run.seconds, run.wall),
    rows.length
      ? el("div", { class: "starts" }, el("h3", {}, "By start"), rows.slice(0, 50).map(([name, seconds]) =>
          el("div", { class: "row" }, el("span", {}, name), timeBar(name, seconds, total(seconds), total(seconds) / longest), el("span", {}, duration(total(seconds)))),
        ))
      : null,
  ];
}

function total(seconds) {
  return Object.entries(seconds).reduce((sum, [phase, value]) => sum + (phase === "wall" ? 0 : value), 0);
}

/** The phases of some seconds, those that the page has colors for in their order and then the others. */
function phasesOf(seconds) {
  const known = PHASES.filter((phase) => seconds[phase] > 0);
  return [...known, ...Object.keys(seconds).filter((phase) => phase !== "wall" && !PHASES.includes(phase) && seconds[phase] > 0)];
}

function timeBar(name, seconds, wall, width) {
  const parts = phasesOf(seconds);
  const text = parts.map((phase) => `${phase} ${percent(seconds[phase] / wall)}`).join(", ");
  const bar = el("div", { class: "bar", role: "img", "aria-label": `Time of ${name}: ${text}` }, parts.map((phase) => {
    const part = el("span", { class: `phase ${PHASES.includes(phase) ? phase : "other"}`, title: `${phase}: ${duration(seconds[phase])} (${percent(seconds[phase] / wall)})` });
    part.style.flexGrow = seconds[phase];
    return part;
  }));
  bar.style.width = `${Math.max(2, 100 * width)}%`;
  return el("div", { class: "track" }, bar);
}

function timeList(seconds, wall) {
  const parts = phasesOf(seconds).toSorted((one, other) => seconds[other] - seconds[one]);
  return el("ul", { class: "phases" }, parts.map((phase) =>
    el("li", {}, el("span", { class: `swatch phase ${PHASES.includes(phase) ? phase : "other"}`, "aria-hidden": "true" }), el("b", {}, phase), ` ${duration(seconds[phase])} · ${percent(seconds[phase] / wall)}`),
  ));
}

// Samples.

function samples({ images, texts, histograms, left_out: out }) {
  return [
    ...byName(images, "images", (sample) => el("div", { class: "images" }, sample.images.map((url, index) => el("img", { src: url, alt: `${sample.name}, step ${sample.step}, image ${index + 1}` })))),
    out ? el("p", { class: "note" }, `${number(out)} images are not shown, to keep the page small; they are in the run directory.`) : null,
    ...byName(texts, "texts", (sample) => el("div", {}, sample.texts.map((text) => el("pre", {}, text)))),
    histograms.length ? el("div", { class: "charts" }, [...new Set(histograms.map((one) => one.name))].map((name) => histogram(name, histograms.filter((one) => one.name === name).at(-1)))) : null,
  ];
}

/** The samples of each name, of which the newest is shown and the others can be chosen by their steps. */
function byName(all, what, show) {
  return [...new Set(all.map((sample) => sample.name))].map((name) => {
    const own = all.filter((sample) => sample.name === name);
    const place = el("div", {}, show(own.at(-1)));
    const choose = el("select", { "aria-label": `Step of the ${what} ${name}`, change: (event) => place.replaceChildren(show(own[event.target.selectedIndex])) },
      own.map((sample, index) => el("option", { selected: index === own.length - 1 }, `step ${number(sample.step)}`)));
    return el("div", { class: "sample" }, el("h3", {}, el("bdi", {}, name), " ", own.length > 1 ? choose : el("small", {}, `step ${number(own[0].step)}`)), place);
  });
}

function histogram(name, sample) {
  const middles = sample.counts.map((_, index) => (sample.edges[index] + sample.edges[index + 1]) / 2);
  const frame = el("div", { class: "plot", role: "img", "aria-label": `Histogram ${name} at step ${sample.step}: ${number(sample.counts.reduce((sum, one) => sum + one, 0))} values from ${number(sample.edges[0])} to ${number(sample.edges.at(-1))}` });
  const figure = el("figure", {}, el("figcaption", {}, el("h4", {}, name), el("span", { class: "legend" }, `step ${number(sample.step)}`)), frame);
  charts.add({
    figure,
    frame,
    draw() {
      this.drawn = true;
      this.bars?.destroy();
      const axis = { stroke: style("--muted"), grid: { stroke: style("--grid"), width: 1 }, font: "11px system-ui, sans-serif" };
      this.bars = new uPlot({
        width: Math.max(200, frame.clientWidth), height: 160, legend: { show: false }, cursor: { show: false },
        scales: { x: { time: false }, y: { range: (_, low, high) => [0, high || 1] } },
        axes: [{ ...axis, values: (_, ticks) => ticks.map((tick) => number(tick, 3)) }, { ...axis, size: 52, values: (_, ticks) => ticks.map(compact) }],
        series: [{}, { stroke: color(0), fill: color(0), paths: uPlot.paths.bars({ size: [0.95, 60] }), points: { show: false } }],
      }, [middles, sample.counts], frame);
    },
  });
  seen.observe(figure);
  return figure;
}

// Tables.

function profile(run) {
  if (!run.ops.length) return null;
  const columns = [{ name: "Operation" }, { name: "Type" }, { name: "Time", numeric: true }, { name: "Share", numeric: true }];
  const rows = run.ops.map((op) => [op.name, op.type, { value: op.time_ms, shown: op.time_ms === null ? "–" : `${number(op.time_ms)} ms` }, { value: op.share, shown: op.share === null ? "–" : percent(op.share) }]);
  return [run.profiled ? el("p", {}, `The operations that took most of the time in ${run.profiled}.`) : null, table("Operations", columns, rows, { sortable: true })];
}

function checkpointTable(run) {
  if (!run.checkpoints.length) return null;
  const scores = [...new Set(run.checkpoints.flatMap((saved) => Object.keys(saved.scores)))].filter((name) => !name.endsWith("/examples")).slice(0, 8);
  const columns = [{ name: "Step", numeric: true }, { name: "Saved" }, { name: "Size", numeric: true }, ...scores.map((name) => ({ name, numeric: true }))];
  const rows = run.checkpoints.toReversed().map((saved) => [
    { value: saved.step, shown: el("span", {}, saved.best ? el("span", { class: "mark best", title: "best" }, `${SIGNS.best} `) : "", number(saved.step)) },
    saved.trouble ? { value: 0, shown: el("span", { class: "bad" }, saved.trouble) } : { value: saved.time, shown: time(saved.time) },
    { value: saved.bytes, shown: bytes(saved.bytes) },
    ...scores.map((name) => ({ value: saved.scores[name], shown: number(saved.scores[name]) })),
  ]);
  const size = run.checkpoints.reduce((sum, saved) => sum + (saved.bytes ?? 0), 0);
  const best = run.checkpoints.find((saved) => saved.best);
  const text = `${number(run.checkpoints.length)} checkpoint${run.checkpoints.length === 1 ? "" : "s"}, ${bytes(size)}.`;
  return [el("p", {}, text, best ? ` The best by ${run.best_metric} is that of step ${number(best.step)}.` : ""), table("Checkpoints", columns, rows, { sortable: true })];
}

function modelTable(run) {
  if (!run.model.length) return null;
  const { parameters, trainable_parameters: trained } = run.totals;
  const flops = run.model.some((row) => row.flops !== null);
  const columns = [{ name: "Variable" }, { name: "Shape" }, { name: "Parameters", numeric: true }, { name: "Trained" }, ...(flops ? [{ name: "FLOPs a step", numeric: true }] : [])];
  const rows = run.model.map((row) => [row.name, row.shape, { value: row.parameters, shown: number(row.parameters) }, row.trainable ? "yes" : "no", ...(flops ? [{ value: row.flops, shown: compact(row.flops) }] : [])]);
  const total = run.totals.flops_per_step;
  const text = `${number(parameters)} parameters, of which ${number(trained)} are trained.${total ? ` A step takes ${compact(total)} FLOPs.` : ""}`;
  const make = () => table("Variables", columns, rows, { sortable: true });
  return [el("p", {}, text), rows.length > 20 ? folded(`${number(rows.length)} variables`, make) : make()];
}

function settings(run) {
  const names = Object.keys(run.settings);
  if (!names.length) return null;
  const code = (text) => el("code", {}, text);
  const changed = run.changed && table("Settings that differ from the defaults", [{ name: "Setting" }, { name: "This run" }, { name: "Default" }], run.changed.map((one) => [code(one.name), code(one.now), code(one.before)]));
  return [
    run.changed ? (run.changed.length ? [el("h3", {}, "Different from the defaults"), changed] : el("p", {}, "All settings have their defaults.")) : null,
    folded(`All ${names.length} settings`, () => table("All settings", [{ name: "Setting" }, { name: "Value" }], names.map((name) => [code(name), code(run.settings[name])]))),
  ];
}

function history(run) {
  const columns = [{ name: "Start" }, { name: "Ended" }, { name: "From step", numeric: true }, { name: "To step", numeric: true }, { name: "Time", numeric: true }, { name: "Changed" }];
  const rows = run.starts.map((start) => [
    time(start.started), badge(start.status), number(start.restored_step ?? 0), number(start.step), duration(total(start.seconds)),
    start.changed.map((one) => `${one.name} ${one.before} → ${one.now}`).join(", ") || "–",
  ]);
  const events = run.marks.filter((mark) => mark.kind === "rollback" || mark.kind === "skipped");
  const facts = [
    ["Command", run.program.command], ["Directory", run.program.directory], ["Run directory", run.directory],
    ["Git commit", run.program.commit && `${run.program.commit}${run.program.changes ? ", with changes" : ", without changes"}`],
    ["Versions", Object.entries(run.versions).map(([name, version]) => `${name} ${version}`).join(", ")],
  ].filter(([, text]) => text);
  if (!rows.length && !facts.length) return null;
  return [
    rows.length ? table("Starts", columns, rows) : null,
    events.length ? el("ul", { class: "events" }, events.slice(0, 50).map((mark) => el("li", { class: `mark ${mark.kind}` }, `${SIGNS[mark.kind]} ${mark.text}`))) : null,
    el("dl", {}, facts.map(([name, text]) => [el("dt", {}, name), el("dd", {}, el("code", {}, text))])),
    run.diff ? folded("Changes since the commit", () => el("pre", { tabindex: "0", class: "diff" }, run.diff)) : null,
  ];
}
