// Elements, numbers, times and sizes. Texts reach the document only as text nodes, never as HTML.

/** Makes an element: `el("td", {class: "number"}, "12")`. A property that is a function is an event listener. */
function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

/** The parts of a text, with places between them where a line may break. */
function breakable(parts) {
  return parts.flatMap((part, index) => (index ? [el("wbr"), part] : [part]));
}

/** A cell with a name that may break after each of its slashes. */
function nameCell(name) {
  return { value: name, shown: el("span", {}, breakable(name.split(/(?<=\/)/))) };
}

/** A number with `digits` significant digits, and a comma between thousands. */
function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e7 || size < 1e-4) return value.toExponential(digits - 1);
  return value.toLocaleString("en", { maximumSignificantDigits: digits });
}

/** A number in words of few characters, such as 1.2 M. */
function compact(value) {
  if (value === null || value === undefined) return "–";
  return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
}

/** A number with a metric prefix, such as "45.8 M" before a unit. */
function metric(value) {
  const prefixes = ["", "k", "M", "G", "T", "P", "E"];
  const size = Math.min(prefixes.length - 1, Math.max(0, Math.floor(Math.log10(value) / 3)));
  return `${number(value / 1000 ** size, 3)} ${prefixes[size]}`;
}

/** A share of a whole, as the console writes it. */
function percent(share) {
  return share > 0 && share < 0.01 ? "<1%" : `${Math.round(100 * share)}%`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${number(seconds, 2)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 72 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function bytes(size) {
  if (size === null || size === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${number(size, 3)} ${units[unit]}`;
}

/** A time of ISO 8601 or in seconds since the epoch, in the reader's time zone. */
function time(value) {
  const date = new Date(typeof value === "number" ? 1000 * value : value);
  if (Number.isNaN(date.getTime())) return String(value ?? "");
  return date.toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
}

/** The color of the palette with a number, or the name of one beside it, as CSS has it now: light or dark. */
function color(index) {
  return style(`--${seriesOf(index)}`);
}

/** The name of that color, which is also a class. */
function seriesOf(index) {
  return `series-${typeof index === "number" ? index % 8 : index}`;
}

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
