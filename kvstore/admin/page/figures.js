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
