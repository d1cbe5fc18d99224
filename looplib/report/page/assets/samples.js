// Images, texts and histograms that the trainer wrote.

function samples({ images, texts, histograms, left_out: out }) {
  return [
    ...byName(images, "images", (sample) =>
      el(
        "div",
        { class: "images" },
        sample.images.map((url, index) =>
          el("img", { src: url, alt: `${sample.name}, step ${sample.step}, image ${index + 1}`, load: enlarge }),
        ),
      ),
    ),
    out
      ? el(
          "p",
          { class: "note" },
          `${number(out)} images are not shown, to keep the page small; they are in the run directory.`,
        )
      : null,
    ...byName(texts, "texts", (sample) =>
      el(
        "div",
        {},
        sample.texts.map((text) => el("pre", {}, text)),
      ),
    ),
    histograms.length
      ? el(
          "div",
          { class: "charts" },
          [...new Set(histograms.map((one) => one.name))].map((name) =>
            histogram(name, histograms.filter((one) => one.name === name).at(-1)),
          ),
        )
      : null,
  ];
}

/** Shows each pixel of a small image as a square of several, and a large image not larger than the page's charts. */
function enlarge({ target: image }) {
  const longest = Math.max(image.naturalWidth, image.naturalHeight);
  image.width = image.naturalWidth * Math.max(Math.min(1, 320 / longest), Math.floor(128 / longest));
}

/** The samples of each name, of which the newest is shown and the others can be chosen by their steps. */
function byName(all, what, show) {
  return [...new Set(all.map((sample) => sample.name))].map((name) => {
    const own = all.filter((sample) => sample.name === name);
    const place = el("div", {}, show(own.at(-1)));
    const choose = el(
      "select",
      {
        "aria-label": `Step of the ${what} ${name}`,
        change: (event) => place.replaceChildren(show(own[event.target.selectedIndex])),
      },
      own.map((sample, index) => el("option", { selected: index === own.length - 1 }, `step ${number(sample.step)}`)),
    );
    return el(
      "div",
      { class: "sample" },
      el("h3", {}, el("bdi", {}, name), " ", own.length > 1 ? choose : el("small", {}, `step ${number(own[0].step)}`)),
      place,
    );
  });
}

function histogram(name, sample) {
  const middles = sample.counts.map((_, index) => (sample.edges[index] + sample.edges[index + 1]) / 2);
  const frame = el("div", {
    class: "plot",
    role: "img",
    "aria-label": `Histogram ${name} at step ${sample.step}: ${number(sample.counts.reduce((sum, one) => sum + one, 0))} values from ${number(sample.edges[0])} to ${number(sample.edges.at(-1))}`,
  });
  const figure = el(
    "figure",
    {},
    el("figcaption", {}, el("h3", {}, name), el("span", { class: "legend" }, `step ${number(sample.step)}`)),
    frame,
  );
  charts.add({
    figure,
    frame,
    draw() {
      this.drawn = true;
      this.bars?.destroy();
      const axis = {
        stroke: style("--muted"),
        grid: { stroke: style("--grid"), width: 1 },
        font: "11px system-ui, sans-serif",
      };
      this.bars = new uPlot(
        {
          width: Math.max(200, frame.clientWidth),
          height: 160,
          legend: { show: false },
          cursor: { show: false },
          scales: { x: { time: false }, y: { range: (_, low, high) => [0, high || 1] } },
          axes: [
            { ...axis, values: (_, ticks) => ticks.map((tick) => number(tick, 3)) },
            { ...axis, size: 52, values: (_, ticks) => ticks.map(compact) },
          ],
          series: [
            {},
            {
              stroke: color(0),
              fill: color(0),
              paths: uPlot.paths.bars({ size: [0.95, 60] }),
              points: { show: false },
            },
          ],
        },
        [middles, sample.counts],
        frame,
      );
    },
  });
  seen.observe(figure);
  return figure;
}
