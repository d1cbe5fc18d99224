// The tables of one run: checkpoints, model, settings and history.

function checkpointTable(run) {
  if (!run.checkpoints.length) return null;
  const scores = [...new Set(run.checkpoints.flatMap((saved) => Object.keys(saved.scores)))]
    .filter((name) => !name.endsWith("/examples"))
    .slice(0, 8);
  const columns = [
    { name: "Step", numeric: true },
    { name: "Saved" },
    { name: "Size", numeric: true },
    ...scores.map((name) => ({ name, numeric: true })),
  ];
  const rows = run.checkpoints.toReversed().map((saved) => [
    {
      value: saved.step,
      shown: el(
        "span",
        {},
        saved.best ? el("span", { class: "mark best", title: "best" }, `${SIGNS.best} `) : "",
        number(saved.step),
      ),
    },
    saved.trouble
      ? { value: 0, shown: el("span", { class: "bad" }, saved.trouble) }
      : { value: saved.time, shown: time(saved.time) },
    { value: saved.bytes, shown: bytes(saved.bytes) },
    ...scores.map((name) => ({ value: saved.scores[name], shown: number(saved.scores[name]) })),
  ]);
  const size = run.checkpoints.reduce((sum, saved) => sum + (saved.bytes ?? 0), 0);
  const best = run.checkpoints.find((saved) => saved.best);
  const text = `${number(run.checkpoints.length)} checkpoint${run.checkpoints.length === 1 ? "" : "s"}, ${bytes(size)}.`;
  return [
    el("p", {}, text, best ? ` The best of them by ${best.best} is that of step ${number(best.step)}.` : ""),
    table("All checkpoints", columns, rows, { sortable: true }),
  ];
}

function modelTable(run) {
  if (!run.model.length) return null;
  const { parameters, trainable_parameters: trained } = run.totals;
  const columns = [
    { name: "Variable" },
    { name: "Shape" },
    { name: "Parameters", numeric: true },
    { name: "Trained" },
  ];
  const rows = run.model.map((row) => [
    nameCell(row.name),
    row.shape,
    { value: row.parameters, shown: number(row.parameters) },
    row.trainable ? "yes" : "no",
  ]);
  const text = `${number(parameters)} parameters, of which ${number(trained)} are trained.${speedOf(run)}`;
  const make = () => table("Variables", columns, rows, { sortable: true });
  return [el("p", {}, text), rows.length > 20 ? folded(`${number(rows.length)} variables`, make) : make()];
}

function speedOf(run) {
  const { flops_per_step: flops, share_of_peak: share, peak } = run.speed;
  if (!flops) return "";
  const text = ` A step takes ${metric(flops)}FLOPs in products of matrices and convolutions`;
  if (!share || !peak) return `${text}.`;
  return `${text}: ${share < 0.001 ? "<0.1" : number(100 * share, 2)}% of the ${metric(peak)}FLOPs a second (${run.dtype}) that the device reaches in a product of large matrices.`;
}

function settings(run) {
  const names = Object.keys(run.settings);
  if (!names.length) return null;
  const code = (text) => el("code", {}, text);
  const changed =
    run.changed &&
    table(
      "Settings that differ from the defaults",
      [{ name: "Setting" }, { name: "This run" }, { name: "Default" }],
      run.changed.map((one) => [code(one.name), code(one.now), code(one.before)]),
    );
  return [
    run.changed
      ? run.changed.length
        ? [el("h3", {}, "Different from the defaults"), changed]
        : el("p", {}, "All settings have their defaults.")
      : null,
    folded(`All ${names.length} settings`, () =>
      table(
        "All settings",
        [{ name: "Setting" }, { name: "Value" }],
        names.map((name) => [code(name), code(run.settings[name])]),
      ),
    ),
  ];
}

function startsOf(run) {
  const columns = [
    { name: "Start" },
    { name: "Ended" },
    { name: "From step", numeric: true },
    { name: "To step", numeric: true },
    { name: "Time", numeric: true },
    { name: "Changed" },
  ];
  const rows = run.starts.map((start, index) => [
    time(start.started),
    badge(start.status),
    number(start.restored_step ?? 0),
    start.status === "killed"
      ? `${number(Math.max(start.step ?? 0, run.starts[index + 1]?.restored_step ?? 0))} or later`
      : number(start.step),
    duration(total(start.seconds)),
    [...start.changed.map((one) => `${one.name} ${one.before} → ${one.now}`), start.note].filter(Boolean).join(", ") ||
      "–",
  ]);
  const events = run.marks.filter((mark) => ["rollback", "warning", "skipped"].includes(mark.kind));
  const facts = [
    ["Command", run.program.command],
    ["Directory", run.program.directory],
    ["Run directory", run.directory],
    [
      "Git commit",
      run.program.commit && `${run.program.commit}${run.program.changes ? ", with changes" : ", without changes"}`,
    ],
    [
      "Versions",
      Object.entries(run.versions)
        .map(([name, version]) => `${name} ${version}`)
        .join(", "),
    ],
  ].filter(([, text]) => text);
  if (!rows.length && !facts.length) return null;
  return [
    rows.length ? table("Starts", columns, rows) : null,
    events.length
      ? el(
          "ul",
          { class: "events" },
          events
            .slice(0, 50)
            .map((mark) => el("li", { class: `mark ${mark.kind}` }, `${SIGNS[mark.kind]} ${mark.text}`)),
        )
      : null,
    el(
      "dl",
      {},
      facts.map(([name, text]) => [el("dt", {}, name), el("dd", {}, el("code", {}, text))]),
    ),
    run.diff ? folded("Changes since the commit", () => el("pre", { tabindex: "0", class: "diff" }, run.diff)) : null,
  ];
}
