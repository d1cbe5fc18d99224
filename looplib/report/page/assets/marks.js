// The signs of what happened at a step, in charts and in their key, and the colors of curves.

const SIGNS = { restart: "↻", rollback: "↩", phase: "◆", best: "★", skipped: "▲", warning: "!" };

/** Draws a line and a sign at the step of each mark. */
function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.font = `${12 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = "center";
  const rows = []; // the place of the last sign in each: signs that would overlap stand below each other
  for (const { kind, step } of [...marks].sort((one, other) => one.step - other.step)) {
    const x = Math.round(plot.valToPos(step, "x", true));
    if (x < bbox.left - 1 || x > bbox.left + bbox.width + 1) continue;
    ctx.strokeStyle = ctx.fillStyle = style(`--mark-${kind}`);
    ctx.lineWidth = ratio;
    if (kind === "skipped") {
      ctx.fillText(SIGNS[kind], x, bbox.top + bbox.height - 2 * ratio);
      continue;
    }
    const free = rows.findIndex((last) => x - last >= 14 * ratio);
    const row = free >= 0 ? free : Math.min(rows.length, 2);
    rows[row] = x;
    const top = bbox.top + (11 + 12 * row) * ratio;
    ctx.setLineDash(kind === "best" ? [] : [4 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(x, top + 4 * ratio);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.fillText(SIGNS[kind], x, top);
  }
  ctx.restore();
}

function swatch(index) {
  return el("span", { class: `swatch ${seriesOf(index)}`, "aria-hidden": "true" });
}
