// The controls of all charts.

/** The controls of all charts: smoothing, scale, and what undoes a zoom. */
function controls() {
  const shown = el("output", { for: "smoothing" }, "0");
  const smoothing = el("input", {
    id: "smoothing",
    type: "range",
    min: "0",
    max: "0.98",
    step: "0.02",
    value: "0",
    input: (event) => {
      view.smoothing = Number(event.target.value);
      shown.textContent = String(view.smoothing);
      redraw();
    },
  });
  const log = el("input", {
    type: "checkbox",
    change: (event) => {
      view.log = event.target.checked;
      redraw();
    },
  });
  const all = el("button", { type: "button", disabled: true, click: () => setRange(null) }, "Show all steps");
  document.addEventListener("range", () => all.toggleAttribute("disabled", !view.range));
  return el(
    "div",
    { class: "controls", role: "group", "aria-label": "Charts" },
    el("label", { for: "smoothing" }, "Smoothing ", smoothing, shown),
    el("label", {}, log, " Log scale"),
    all,
    el("span", { class: "hint" }, "Drag to zoom, double-click to show all."),
  );
}
