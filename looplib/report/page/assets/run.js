// The page of one run.

const FEW = 12; // charts of a kind that are not folded
const ENDED = { done: "good", failed: "bad", killed: "bad" };

function runPage(run) {
  const sections = [
    section("verdict", "Verdict", failure(run), verdict(run)),
    section("curves", "Curves", curves(run)),
    section("time", "Time", timeOf(run)),
    section("samples", "Samples", samples(run.samples)),
    section("checkpoints", "Checkpoints", checkpointTable(run)),
    section("model", "Model", modelTable(run)),
    section("settings", "Settings", settings(run)),
    section("history", "History", startsOf(run)),
  ];
  const facts = [run.strategy, run.started && `started ${time(run.started)}`, run.wall && `took ${duration(run.wall)}`];
  return page(run.name, badge(run.status), facts, [tiles(run), ...sections]);
}

/** The frame of a page: name, facts, links to the sections, and the sections. */
function page(title, mark, facts, content) {
  const kept = content.filter(Boolean);
  const links = kept
    .filter((one) => one.id)
    .map((one) => el("a", { href: `#${one.id}`, click: (event) => follow(event, one) }, one.querySelector("h2").textContent));
  return [
    el(
      "header",
      {},
      el("h1", {}, el("bdi", {}, title), " ", mark),
      el(
        "p",
        { class: "facts" },
        facts.filter(Boolean).map((fact) => el("span", {}, fact)),
      ),
      el("nav", { "aria-label": "Sections" }, links),
    ),
    el("main", {}, kept),
    el("footer", {}, `Written by looplib, ${time(report.written)}.`),
  ];
}

/** In a notebook's frame, whose address is the notebook's, the link would lead to the notebook. */
function follow(event, target) {
  if (location.protocol !== "about:") return;
  event.preventDefault();
  target.scrollIntoView();
}

function badge(status) {
  return el("span", { class: `badge ${ENDED[status] ?? "note"}` }, status || "unknown");
}

/** The numbers that one looks for first. */
function tiles(run) {
  const drawn = run.curves.filter((curve) => !curve.undone && curve.last);
  const tile = (name, value, detail) =>
    el("div", { class: "tile" }, el("span", {}, name), el("b", {}, value), el("small", {}, detail));
  const metrics = drawn
    .filter((curve) => kindOf(curve.name) === "Metrics")
    .toSorted((one, other) => Number(one.split === "train") - Number(other.split === "train"))
    .slice(0, 4)
    .map((curve) => {
      const { best } = curve;
      const detail =
        best && best.step !== curve.last.step
          ? `best ${number(best.value)} at step ${number(best.step)}`
          : `at step ${number(curve.last.step)}`;
      return tile(`${curve.split} ${curve.name}`, number(curve.last.value), detail);
    });
  const rate = drawn.find((curve) => curve.name === "steps_per_second");
  return el(
    "div",
    { class: "tiles" },
    metrics,
    run.step === null
      ? null
      : tile("steps", number(run.step), courseOf(run)),
    rate ? tile("steps a second", number(median(rate.values)), "median") : null,
    run.wall ? tile("time", duration(run.wall), `${percent((run.seconds.train ?? 0) / run.wall)} training`) : null,
    run.totals.parameters === undefined
      ? null
      : tile(
          "parameters",
          compact(run.totals.parameters),
          run.totals.parameters < 1000 ? "of the model" : number(run.totals.parameters),
        ),
  );
}

/** What happened to the run on its way: restarts, rollbacks, and an earlier checkpoint that was restored at the end. */
function courseOf(run) {
  const counted = (count, what) => (count ? `${number(count)} ${what}${count === 1 ? "" : "s"}` : null);
  const parts = [
    counted(restartsOf(run), "restart"),
    counted(run.rollbacks, "rollback"),
    run.final_step === null ? null : `back at step ${number(run.final_step)}`,
  ].filter(Boolean);
  return parts.length ? parts.join(", ") : "without a restart";
}

/** How often the run was started again, without the starts that found nothing to train. */
function restartsOf(run) {
  return Math.max(0, run.starts.filter((start) => start.trained).length - 1);
}

function median(values) {
  const sorted = values.filter((value) => value !== null).toSorted((one, other) => one - other);
  return sorted[Math.floor(sorted.length / 2)];
}

function failure(run) {
  if (!run.error) return null;
  return el(
    "div",
    { class: "failure", role: "note", "aria-label": "Error" },
    el("b", {}, "Error"),
    el("pre", {}, run.error),
    run.traceback ? folded("Traceback", () => el("pre", { tabindex: "0" }, run.traceback)) : null,
  );
}

function verdict(run) {
  const all = [...run.findings, ...run.notes.map((text) => ({ kind: "note", text, advice: "" }))];
  const words = { good: "✓", note: "!", bad: "✗" };
  const items = all.map(({ kind, text, advice }) =>
    el(
      "li",
      { class: kind },
      el("span", { class: "sign", "aria-hidden": "true" }, words[kind]),
      el("div", {}, text, advice ? el("span", { class: "advice" }, ` ${advice}`) : ""),
    ),
  );
  return items.length ? el("ul", { class: "findings" }, items) : null;
}

// Curves.

function kindOf(name) {
  if (name === "epoch" || name === "examples") return null;
  if (/per_second$|share_of_peak$/.test(name)) return "Speed";
  if (/^(learning_rate|gradient_norm|weight_norm|update_norm|loss_scale|skipped_steps)$/.test(name))
    return "Optimization";
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
    return bad
      .map(
        (curve) =>
          `${curve.split}: ${number(curve.bad)} value${curve.bad === 1 ? "" : "s"} not finite, first at step ${number(curve.bad_steps[0])}.`,
      )
      .join(" ");
  };
  const groups = grouped([...names], (name) => new Chart(name, lines(name), run.marks, note(name)).figure);
  return groups.length ? [controls(), marksKey(run), ...groups] : null;
}

/** A curve with a null in each gap between what one restart or rollback took back and what the next one did. */
function inPieces(steps, values) {
  const gaps = steps.slice(1).map((step, index) => step - steps[index]);
  const wide = 3 * least(gaps.filter((gap) => gap > 0));
  const cut = (list, fill) => list.flatMap((item, index) => (gaps[index] > wide ? [item, fill(index)] : [item]));
  return [cut(steps, (index) => steps[index] + gaps[index] / 2), cut(values, () => null)];
}

function lineOf(curve, label, index) {
  const [steps, values] = curve.undone ? inPieces(curve.steps, curve.values) : [curve.steps, curve.values];
  return {
    label,
    steps,
    values,
    color: index,
    points: curve.points <= 40,
    undone: curve.undone,
  };
}

/** Charts in a grid, those of the loss first; kinds of many charts, such as the norms of each layer, are folded. */
function grouped(names, chart) {
  const kinds = new Map([
    ["Metrics", []],
    ["Optimization", []],
    ["Speed", []],
  ]);
  for (const name of names) {
    const kind = kindOf(name);
    if (kind) kinds.set(kind, [...(kinds.get(kind) ?? []), name]);
  }
  const first = (name) => (name === "loss" ? 0 : 1);
  const grid = (own) =>
    el("div", { class: "charts" }, own.toSorted((one, other) => first(one) - first(other)).map(chart));
  const few = [...kinds.values()].filter((own) => own.length <= FEW).flat();
  const many = [...kinds].filter(([, own]) => own.length > FEW);
  return [
    few.length ? grid(few) : null,
    ...many.map(([kind, own]) => folded(`${kind} (${own.length} charts)`, () => grid(own))),
  ].filter(Boolean);
}

function marksKey(run) {
  const names = {
    restart: "restart",
    rollback: "rollback",
    warning: "warning",
    skipped: "skipped steps",
    best: "best checkpoint kept",
  };
  const kinds = Object.keys(names).filter((kind) => run.marks.some((mark) => mark.kind === kind));
  const undone = run.curves.some((curve) => curve.undone);
  if (!kinds.length && !undone) return null;
  const items = kinds.map((kind) =>
    el("span", { class: `mark ${kind}` }, el("span", { "aria-hidden": "true" }, SIGNS[kind]), ` ${names[kind]}`),
  );
  return el(
    "p",
    { class: "key" },
    items,
    undone ? el("span", {}, el("span", { class: "dotted", "aria-hidden": "true" }), " taken back") : null,
  );
}
