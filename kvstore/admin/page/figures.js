// Figures as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function sized(value, units, base) {
  let at = 0;
  while (value >= base * 0.9995 && at < units.length - 1) {
    value /= base;
    at += 1;
  }
  return `${at === 0 || value >= 9.95 ? Math.round(value) : value.toFixed(1)} ${units[at]}`;
}

/** Bytes as they are typed: "64 GiB", "500 MB", "0". Throws an Error that says what is wrong. */
function parseBytes(text) {
  const found = /^([0-9]+(?:\.[0-9]+)?) *([kmgtp]?)(i?)b?$/i.exec(text.trim());
  if (!found || (found[3] && !found[2])) throw new Error(`“${text.slice(0, 40)}” is no size: 64 GiB or 1.5 TiB is one`);
  const value = Math.round(Number(found[1]) * (found[3] ? 1024 : 1000) ** " kmgtp".indexOf(found[2].toLowerCase() || " "));
  if (value > Number.MAX_SAFE_INTEGER) throw new Error(`“${text.slice(0, 40)}” is more than there can be`);
  return value;
}

/** Bytes so that parseBytes finds them again. */
function exactBytes(value) {
  let at = 0;
  while (value && value % 1024 === 0 && at < UNITS.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${value} ${UNITS[at]}`;
}

const SPANS = { s: 1, min: 60, h: 3600, d: 86400 };

/** Seconds of a time as it is typed: "90 s", "36 h", "7 days". Throws an Error that says what is wrong. */
function parseSpan(text) {
  const found = /^([0-9]+(?:\.[0-9]+)?) *(s|min|h|d|days?)$/.exec(text.trim());
  if (!found || !Number(found[1])) throw new Error(`“${text.slice(0, 40)}” is no time: 90 s, 30 min, 36 h or 7 d is one`);
  return Number(found[1]) * SPANS[found[2].startsWith("d") ? "d" : found[2]];
}

/** Seconds so that parseSpan finds them again. */
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
const many = (number, one, more) => `${count(number)} ${number === 1 ? one : more}`;

/** Differences of totals that only grow. The first look, and one after a restart, is no rate. */
class Rates {
  constructor() {
    this.last = new Map();
  }

  /** Units a second since the last look of this name; null: not known yet. */
  of(name, total, now) {
    const before = this.last.get(name);
    this.last.set(name, { total, now });
    if (!before || total < before.total || now <= before.now) return null;
    return ((total - before.total) * 1000) / (now - before.now);
  }
}

/** Values of the last while, bounded. */
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
