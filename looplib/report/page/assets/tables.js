// Tables in a frame that scrolls, with rows that a click on a column's head sorts.

/**
 * Makes a table.
 *
 * @param {string} label what it shows, for screen readers
 * @param {{name: string, numeric?: boolean}[]} columns
 * @param {(string|Node|{value: number|string|null, shown: string|Node})[][]} rows a cell that is sorted by something
 *     else than its text is an object
 * @param {{sortable?: boolean}} options
 */
function table(label, columns, rows, options = {}) {
  const body = el("tbody");
  const order = { column: -1, up: true };
  const heads = columns.map((column, index) => {
    const sort = () => {
      order.up = order.column === index ? !order.up : !column.numeric || Boolean(column.lessFirst);
      order.column = index;
      heads.forEach((head, other) =>
        other === index
          ? head.setAttribute("aria-sort", order.up ? "ascending" : "descending")
          : head.removeAttribute("aria-sort"),
      );
      fill(rows.toSorted((one, other) => (order.up ? 1 : -1) * compareCells(one[index], other[index], order.up)));
    };
    const name = breakable(column.name.split(/(?<=[./_])/));
    const content = options.sortable ? el("button", { type: "button", click: sort }, name) : name;
    return el("th", { scope: "col", class: column.numeric ? "number" : null }, content);
  });
  const fill = (sorted) => body.replaceChildren(...sorted.map((cells) => el("tr", {}, cells.map(cell))));
  const cell = (content, index) => {
    const shown = isPair(content) ? content.shown : content;
    return el("td", { class: columns[index].numeric ? "number" : null }, shown);
  };
  fill(rows);
  const inner = el("table", { "aria-label": label }, el("thead", {}, el("tr", {}, heads)), body);
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, inner);
}

function isPair(content) {
  return content !== null && typeof content === "object" && "shown" in content;
}

/** Compares two cells; one without a value comes last, whichever way the rows are sorted. */
function compareCells(one, other, up) {
  const [a, b] = [one, other].map((content) => (isPair(content) ? content.value : content));
  if (a === null || b === null || a === undefined || b === undefined) {
    return (up ? 1 : -1) * (Number(a === null || a === undefined) - Number(b === null || b === undefined));
  }
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

/** A section with a heading, which the navigation at the top links to; null without content. */
function section(id, title, ...content) {
  const kept = content.flat().filter(Boolean);
  if (!kept.length) return null;
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), kept);
}

/** Content that a click on its summary opens; made when it is first opened. */
function folded(summary, make, open = false) {
  const details = el("details", { open }, el("summary", {}, summary));
  const fill = () => details.childElementCount === 1 && details.append(make());
  details.addEventListener("toggle", () => details.open && fill());
  if (open) fill();
  return details;
}
