// Curves that lie on each other, and would hide each other.

const SAME = 0.004; // of the range of a chart: less than the width of a curve

/** The groups of lines that cannot be told apart by eye, each of two or more in the order in which they are drawn. */
function coinciding(lines, log) {
  const curves = lines.filter((line) => !line.undone).map((line) => ({ line, points: pointsOf(line, log) }));
  const values = curves.flatMap(({ points }) => points.map(([, value]) => value));
  const near = SAME * (most(values) - least(values));
  const groups = [];
  for (const curve of curves.filter(({ points }) => points.length > 1)) {
    const group = groups.find(([first]) => areNear(first.points, curve.points, near));
    if (group) group.push(curve);
    else groups.push([curve]);
  }
  return groups.filter((group) => group.length > 1).map((group) => group.map(({ line }) => line));
}

function pointsOf(line, log) {
  const points = line.steps.map((step, index) => [step, line.values[index]]).filter(([, value]) => value !== null);
  return log ? points.filter(([, value]) => value > 0).map(([step, value]) => [step, Math.log(value)]) : points;
}

/** Whether each of two curves is near the other one at its own steps, as far as both go. */
function areNear(one, other, near) {
  const first = Math.max(one[0][0], other[0][0]);
  const last = Math.min(one.at(-1)[0], other.at(-1)[0]);
  const isNear = (points, line) => {
    let at = 0;
    return points.every(([step, value]) => {
      if (step < first || step > last) return true;
      while (at < line.length - 2 && line[at + 1][0] < step) at += 1;
      const [[from, low], [to, high]] = [line[at], line[at + 1]];
      const there = to > from ? low + ((high - low) * (step - from)) / (to - from) : low;
      return Math.abs(value - there) <= near;
    });
  };
  return last > first && isNear(one, other) && isNear(other, one);
}

/** Dashes for all lines of a group except the first, so that each shows in its own part of the same stretch. */
function dashesOf(groups) {
  const dashes = groups.flatMap((group) =>
    group.slice(1).map((line, index) => [line, [7 * (group.length - 1 - index), 7 * (index + 1)]]),
  );
  return new Map(dashes);
}

/** A sentence that names the lines of each group; "" if there is none. */
function wordsOf(groups) {
  return groups
    .map((group) => {
      const names = group.slice(0, 4).map((line) => line.label);
      const others = group.length > names.length ? [`${group.length - names.length} more`] : [];
      const listed = [...names, ...others];
      return `${listed.slice(0, -1).join(", ")} and ${listed.at(-1)} coincide (dashed).`;
    })
    .join(" ");
}
