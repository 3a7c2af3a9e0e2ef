// Formatting and parsing of figures.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function sized(value, units, base) {
  let at = 0;
  while (value >= base * 0.9995 && at < units.length - 1) {
    value /= base;
    at += 1;
  }
  return `${at === 0 || value >= 9.95 ? Math.round(value) : value.toFixed(1)} ${units[at]}`;
}

/** Parse a size such as "64 GiB", "500 MB" or "0". Throws an Error with the reason. */
function parseBytes(text) {
  const found = /^([0-9]+(?:\.[0-9]+)?) *([kmgtp]?)(i?)b?$/i.exec(text.trim());
  if (!found || (found[3] && !found[2])) throw new Error(`“${text.slice(0, 40)}” is not a size. Examples: 64 GiB, 1.5 TiB`);
  const value = Math.round(Number(found[1]) * (found[3] ? 1024 : 1000) ** " kmgtp".indexOf(found[2].toLowerCase() || " "));
  if (value > Number.MAX_SAFE_INTEGER) throw new Error(`“${text.slice(0, 40)}” is too large`);
  return value;
}

/** Format bytes without rounding, for parseBytes. */
function exactBytes(value) {
  let at = 0;
  while (value && value % 1024 === 0 && at < UNITS.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${value} ${UNITS[at]}`;
}

const SPANS = { s: 1, min: 60, h: 3600, d: 86400 };

/** Parse a duration such as "90 s", "36 h" or "7 days" into seconds. Throws an Error with the reason. */
function parseSpan(text) {
  const found = /^([0-9]+(?:\.[0-9]+)?) *(s|min|h|d|days?)$/.exec(text.trim());
  if (!found || !Number(found[1])) throw new Error(`“${text.slice(0, 40)}” is not a duration. Examples: 90 s, 30 min, 36 h, 7 d`);
  return Number(found[1]) * SPANS[found[2].startsWith("d") ? "d" : found[2]];
}

/** Format seconds without rounding, for parseSpan. */
function exactSpan(value) {
  const unit = ["d", "h", "min"].find((one) => value >= SPANS[one] && value % SPANS[one] === 0) ?? "s";
  return `${value / SPANS[unit]} ${unit}`;
}

const bytes = (value) => sized(value, UNITS, 1024);
const rate = (value) => (value === null ? "—" : sized(value, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"], 1000));
const count = (value) => value.toLocaleString("en");
const percent = (value) => (value === null ? "—" : `${(value * 100).toFixed(value > 0 && value < 0.9995 ? 1 : 0)} %`);

function seconds(value) {
  if (value === null) return "—";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 90) return `${value.toFixed(value < 10 ? 2 : 0)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} days`;
}

const ago = (value) => (value < 1 ? "now" : `${value < 90 ? `${Math.round(value)} s` : seconds(value)} ago`);
const clock = (date) => date.toLocaleTimeString("en-GB");
const minute = (at_s) => new Date(at_s * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
const many = (number, one, more) => `${count(number)} ${number === 1 ? one : more}`;

/** Rates from totals. The first value, and the first one after a restart, gives no rate. */
class Rates {
  constructor() {
    this.last = new Map();
  }

  /** Units per second since the last value of this name; null: unknown. */
  of(name, total, now) {
    const before = this.last.get(name);
    this.last.set(name, { total, now });
    if (!before || total < before.total || now <= before.now) return null;
    return ((total - before.total) * 1000) / (now - before.now);
  }
}

/** The last values, up to a maximum number. */
class History {
  constructor(most) {
    this.most = most;
    this.values = [];
  }

  add(value) {
    this.values.push(value);
    if (this.values.length > this.most) this.values.shift();
  }
}
