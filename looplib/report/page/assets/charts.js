// Charts of curves by step, drawn by uPlot: one hover, one zoom, one smoothing and one scale for all charts of the page.

const view = { smoothing: 0, log: false, range: null, hidden: new Set() };
const charts = new Set();
const HEIGHT = 220;
const PAPER_WIDTH = 640; // fits on A4 and Letter between margins of 1 cm

/**
 * @typedef {object} Line
 * @property {string} label
 * @property {number[]} steps
 * @property {(number|null)[]} values
 * @property {number} color of the palette
 * @property {string} [group] lines of a hidden group are not drawn
 * @property {boolean} [points] whether each value has a dot
 * @property {boolean} [undone] what a restart or a rollback has taken back: thin, and without hover
 */

// How a chart shows its values: as numbers, as bytes, or as shares of a whole, whose areas lie on top of each other.
const LOOKS = {
  numbers: { text: (value) => number(value, 5), ticks: tickTexts, range: padded },
  bytes: { text: bytes, ticks: (ticks) => ticks.map(bytes), range: (_, low, high) => [0, 1.06 * (high || 1)] },
  shares: { text: percent, ticks: (ticks) => ticks.map(percent), range: () => [0, 1] },
};

/** One chart in a figure. It is drawn when it comes near the screen. */
class Chart {
  constructor(title, lines, marks = [], note = "", look = "numbers") {
    this.title = title;
    this.look = LOOKS[look];
    this.stacked = look === "shares";
    this.lines = lines;
    this.marks = marks;
    this.tip = el("div", { class: "tip", hidden: true });
    this.overlaps = el("p", { class: "note" });
    this.spoken = el("div", { class: "unseen", "aria-live": "polite" });
    this.frame = el("div", {
      class: "plot",
      tabindex: "0",
      role: "group",
      "aria-label": this.summary(),
      keydown: (event) => this.key(event),
    });
    this.figure = el(
      "figure",
      {},
      el("figcaption", {}, el("h3", {}, title), el("span", { class: "legend" }, this.legend())),
      this.frame,
      this.spoken,
      note ? el("p", { class: "note" }, note) : null,
      this.overlaps,
      folded("Values", () => this.valueTable()),
    );
    charts.add(this);
    seen.observe(this.figure);
  }

  legend() {
    const named = this.lines.filter((line) => !line.undone);
    if ((named.length > 4 && !this.stacked) || (named.length === 1 && !named[0].label)) return [];
    return named.map((line) => el("span", {}, swatch(line.color), line.label));
  }

  summary() {
    const parts = this.lines
      .filter((line) => !line.undone)
      .slice(0, 8)
      .map((line) => {
        const finite = line.values.filter((value) => value !== null);
        if (!finite.length) return `${line.label}: no finite value`;
        const { text } = this.look;
        return `${line.label}: ${text(finite[0])} to ${text(finite.at(-1))}, lowest ${text(least(finite))}, highest ${text(most(finite))}`;
      });
    return `Chart of ${this.title} by step. ${parts.join(". ")}. Arrow keys read values, plus and minus zoom, Escape shows all.`;
  }

  valueTable() {
    const rows = this.lines.flatMap((line) => {
      const stride = Math.ceil(line.steps.length / 25);
      const kept = line.steps
        .map((_, index) => index)
        .filter((index) => index % stride === 0 || index === line.steps.length - 1);
      return kept.map((index) => [
        line.undone ? `${line.label} (undone)` : line.label,
        number(line.steps[index]),
        this.look.text(line.values[index]),
      ]);
    });
    const columns = [{ name: "Curve" }, { name: "Step", numeric: true }, { name: "Value", numeric: true }];
    return table(`Values of ${this.title}`, columns, rows);
  }

  draw() {
    this.drawn = true;
    this.plot?.destroy();
    const shown = this.lines.filter((line) => !view.hidden.has(line.group));
    const series = [{ label: "step" }];
    const tables = [];
    const groups = this.stacked ? [] : coinciding(shown, view.log);
    const dashes = dashesOf(groups);
    this.overlaps.textContent = wordsOf(groups);
    this.hovered = [null];
    const add = (line, values, look, hovered) => {
      tables.push([line.steps, view.log ? values.map((value) => (value > 0 ? value : null)) : values]);
      series.push({ label: line.label, stroke: color(line.color), spanGaps: false, ...look });
      this.hovered.push(hovered ? line : null);
    };
    if (this.stacked) this.stack(shown, series, tables);
    for (const line of this.stacked ? [] : shown) {
      if (line.undone) add(line, line.values, { width: 1, dash: [2, 3], alpha: 0.6, points: { show: false } }, false);
      else {
        const size = line.steps.length === 1 ? 8 : 5;
        const dots = { show: line.points || line.steps.length < 3, size, fill: color(line.color) };
        const smooth = view.smoothing > 0 && line.steps.length > 3;
        if (smooth) add(line, line.values, { width: 1, alpha: 0.3, points: { show: false } }, false);
        add(
          line,
          smooth ? smoothed(line.values, view.smoothing) : line.values,
          { width: 1.75, dash: dashes.get(line), points: smooth ? { show: false } : dots },
          true,
        );
      }
    }
    const kept = tables.map(() => [1, 2]); // a null of a curve ends its line at the values around it
    const data = tables.length ? uPlot.join(tables, kept) : [[]];
    this.plot = new uPlot(this.options(series), data, this.frame);
    this.plot.over.append(this.tip);
    if (view.range) this.plot.setScale("x", view.range);
  }

  /** Adds the sums of each line and those before it, the highest first, so that each area covers a part of the last. */
  stack(lines, series, tables) {
    lines.toReversed().forEach((line, index) => {
      const below = lines.slice(0, lines.length - index);
      const sums = line.steps.map((_, at) => below.reduce((sum, one) => sum + one.values[at], 0));
      const paths = uPlot.paths.stepped({ align: -1 });
      series.push({ label: line.label, fill: color(line.color), width: 0, paths, points: { show: false } });
      tables.push([line.steps, sums]);
      this.hovered.push(line);
    });
  }

  options(series) {
    const axis = {
      stroke: style("--muted"),
      grid: { stroke: style("--grid"), width: 1 },
      ticks: { stroke: style("--grid"), width: 1, size: 4 },
      font: "11px system-ui, sans-serif",
    };
    const log = view.log && !this.stacked;
    return {
      width: widthOf(this),
      height: HEIGHT,
      series,
      legend: { show: false },
      scales: { x: { time: false }, y: { distr: log ? 3 : 1, range: log ? undefined : this.look.range } },
      axes: [
        { ...axis, space: 60, size: 34, values: (_, ticks) => ticks.map(compact) },
        {
          ...axis,
          size: (_, texts) => 18 + 6.5 * Math.max(3, ...(texts ?? []).map((text) => text.length)),
          values: (_, ticks) => this.look.ticks(ticks).map((text, index) => (ticks[index] === null ? "" : text)),
        },
      ],
      cursor: {
        y: false,
        drag: { x: true, y: false, setScale: false },
        points: { size: 7 },
        dataIdx: (plot, index, hovered) => (this.hovered[index] ? nearest(plot.data[index], hovered) : null),
        sync: {
          key: "steps",
          setSeries: false,
          scales: ["x", null],
          filters: { pub: (type) => type === "mousemove" || type === "mouseleave" },
        },
        bind: { dblclick: () => () => setRange(null) },
      },
      hooks: {
        // Behind curves, whose points they would hide, but before areas, which would hide them.
        [this.stacked ? "draw" : "drawAxes"]: [(plot) => drawMarks(plot, this.marks)],
        setCursor: [(plot) => this.hover(plot)],
        setSelect: [(plot) => this.select(plot)],
      },
    };
  }

  select(plot) {
    const { left, width } = plot.select;
    if (width > 4) setRange({ min: plot.posToVal(left, "x"), max: plot.posToVal(left + width, "x") });
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  }

  /** What stands at the cursor: [line, step, value, smoothed], those of a comparison with the highest value first. */
  readings(plot) {
    const rows = this.hovered.map((line, index) => {
      const at = line ? plot.cursor.idxs[index] : null;
      const value = at === null || at === undefined ? null : plot.data[index][at];
      if (value === null || value === undefined) return null;
      const step = plot.data[0][at];
      return [line, step, line.values[line.steps.indexOf(step)], value];
    });
    const kept = rows.filter(Boolean);
    return kept.length > 4 ? kept.sort((one, other) => other[2] - one[2]) : kept;
  }

  hover(plot) {
    const { left, idx } = plot.cursor;
    const rows = left >= 0 && idx !== null && idx !== undefined ? this.readings(plot) : [];
    this.tip.hidden = !rows.length;
    if (!rows.length || !(this.isPointed(plot) || this.keyed)) {
      this.tip.hidden = true;
      return;
    }
    const near = this.marks.filter((mark) => Math.abs(plot.valToPos(mark.step, "x") - left) < 6);
    this.tip.replaceChildren(
      el("b", {}, `step ${number(plot.data[0][idx])}`),
      ...rows
        .slice(0, 12)
        .map(([line, step, value, smooth]) =>
          el(
            "div",
            {},
            swatch(line.color),
            `${line.label} ${this.look.text(value)}`,
            smooth === value || this.stacked ? "" : el("i", {}, ` smoothed ${this.look.text(smooth)}`),
            step === plot.data[0][idx] ? "" : el("i", {}, ` at ${number(step)}`),
          ),
        ),
      ...(rows.length > 12 ? [el("i", {}, `and ${rows.length - 12} more`)] : []),
      ...near.slice(0, 3).map((mark) => el("div", { class: `mark ${mark.kind}` }, mark.text)),
    );
    const width = plot.over.clientWidth;
    this.tip.style.maxWidth = `${Math.max(left, width - left) - 16}px`;
    this.tip.style.left = left < width / 2 ? `${left + 12}px` : "auto";
    this.tip.style.right = left < width / 2 ? "auto" : `${width - left + 12}px`;
  }

  isPointed(plot) {
    return plot.over.matches(":hover");
  }

  key(event) {
    const { plot } = this;
    if (!plot || event.target !== this.frame || event.ctrlKey || event.altKey || event.metaKey) return;
    const { min, max } = plot.scales.x;
    const zoom = (factor) => {
      const middle = plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : (min + max) / 2;
      setRange({ min: middle - (middle - min) * factor, max: middle + (max - middle) * factor });
    };
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };
    if (event.key in moves) this.move(moves[event.key]);
    else if (event.key === "+" || event.key === "=") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else if (event.key === "Escape") setRange(null);
    else return;
    event.preventDefault();
  }

  move(by) {
    const { plot } = this;
    const steps = plot.data[0];
    const from = plot.cursor.left >= 0 ? plot.cursor.idx : by > 0 ? -1 : steps.length;
    const to = Math.min(steps.length - 1, Math.max(0, from + by));
    this.keyed = true;
    plot.setCursor({ left: plot.valToPos(steps[to], "x"), top: HEIGHT / 3 });
    this.keyed = false;
    const read = this.readings(plot).map(
      ([line, step, value]) => `${line.label} ${this.look.text(value)}${step === steps[to] ? "" : ` at ${number(step)}`}`,
    );
    this.spoken.textContent = `step ${number(steps[to])}: ${read.slice(0, 12).join(", ")}`;
  }
}

const seen = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const chart = entry.isIntersecting && [...charts].find((one) => one.figure === entry.target);
      if (chart && !chart.drawn) chart.draw();
    }
  },
  { rootMargin: "400px" },
);

addEventListener("beforeprint", () => {
  for (const chart of charts) {
    if (!chart.drawn && chart.frame.clientWidth) chart.draw();
  }
  resize(() => PAPER_WIDTH);
});

addEventListener("afterprint", () => resize(widthOf));

/** Draws all charts that were drawn once more, because the colors, the scale or the smoothing changed. */
function redraw() {
  for (const chart of charts) if (chart.drawn) chart.draw();
}

/** Zooms all charts to a range of steps; null shows all. */
function setRange(range) {
  const spans = [...charts].filter((chart) => chart.plot).map((chart) => chart.plot.data[0]);
  const first = least(spans.map((steps) => steps[0] ?? 0));
  const last = most(spans.map((steps) => steps.at(-1) ?? 0));
  if (range && range.min <= first && range.max >= last) range = null;
  view.range = range && { min: Math.max(first, range.min), max: Math.min(last, range.max) };
  for (const { plot } of charts) {
    if (!plot) continue;
    const steps = plot.data[0];
    plot.setScale("x", view.range ?? { min: steps[0] ?? 0, max: steps.at(-1) ?? 1 });
  }
  document.dispatchEvent(new Event("range"));
}

/** Debiased exponential moving average: a value keeps `weight` of what came before it. */
function smoothed(values, weight) {
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + 1 - weight;
    return sum / norm;
  });
}

/** The index of the value next to `at` that is there; undefined stands where only another curve has a step. */
function nearest(values, at) {
  for (let away = 0; away < values.length; away += 1) {
    for (const index of [at - away, at + away]) if (values[index] !== undefined && values[index] !== null) return index;
  }
  return at;
}

/** The numbers of an axis, with as few digits as tell them apart. */
function tickTexts(ticks) {
  const known = ticks.filter((tick) => tick !== null);
  const gap = least([...known.slice(1).map((tick, index) => tick - known[index]), most(known.map(Math.abs)) || 1]);
  const texts = (digits) => ticks.map((tick) => number(tick, digits));
  const isExact = (text, index) => Math.abs(Number(text.replaceAll(",", "")) - ticks[index]) < 0.01 * gap;
  let digits = 1;
  while (digits < 8 && !texts(digits).every((text, index) => ticks[index] === null || isExact(text, index))) digits += 1;
  return texts(digits);
}

function padded(_, low, high) {
  if (low === null || high === null) return [0, 1];
  if (high - low <= 1e-6 * Math.abs(high)) return high ? [Math.min(0, 2 * high), Math.max(0, 2 * high)] : [-1, 1];
  const space = 0.06 * (high - low);
  return [low >= 0 && low < space ? 0 : low - space, high + space];
}

function least(values) {
  return values.reduce((one, other) => (other < one ? other : one), Infinity);
}

function most(values) {
  return values.reduce((one, other) => (other > one ? other : one), -Infinity);
}

/** The width that a chart has room for. */
function widthOf(chart) {
  return Math.max(200, chart.frame.clientWidth);
}

/** Draws all charts that were drawn once more, each as wide as a function of it says. */
function resize(width) {
  for (const chart of charts) chart.plot?.setSize({ width: width(chart), height: HEIGHT });
}

const sizes = new ResizeObserver(() => resize(widthOf));
