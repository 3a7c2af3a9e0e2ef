// Charts of the last hour, and the timeline of events and faults.

const TIMELINE_ROWS = 25;
const NAMED_NODES = 3;
const fillOf = (tier) => (tier === null ? null : tier.used_bytes / tier.capacity_bytes);
const perSecond = (value, point) => value / Math.max(1, point.seconds);
const percentiles = (name) => [
  { name: "p50", style: "in", of: (point) => point[name]?.p50_s ?? null },
  { name: "p99", style: "out", of: (point) => point[name]?.p99_s ?? null },
];
const bytesOf = (name, label, style) => ({ name: label, style, of: (point) => perSecond(point.throughput[name], point) });

const CHARTS = [
  {
    id: "ratio",
    top: 1,
    shown: (value) => `${value * 100} %`,
    now: percent,
    series: [{ name: "hit ratio", style: "in", of: (point) => point.hit_ratio }],
    empty: "No lookups in the last hour. An engine looks up the prefix of each prompt; the ratio appears here within 10 s.",
    cluster: true,
  },
  {
    id: "lookup",
    shown: seconds,
    series: percentiles("lookup"),
    empty: "No lookups in the last hour. The duration of a lookup appears here within 10 s.",
    cluster: true,
  },
  {
    id: "latency",
    shown: seconds,
    series: percentiles("load"),
    empty: "No loads in the last hour. A load follows a lookup with hits; its duration appears here within 10 s.",
  },
  {
    id: "throughput",
    shown: rate,
    series: [
      bytesOf("dram", "local DRAM", "in"),
      bytesOf("nvme", "local NVMe", "out"),
      bytesOf("peer", "other nodes", "third"),
      bytesOf("data_plane", "sent to other hosts", "fourth"),
    ],
    empty: "No bytes were loaded in the last hour. Bytes that engines load appear here within 10 s, by source.",
  },
  {
    id: "paths",
    shown: rate,
    series: [
      bytesOf("planned_prefill", "prefill host", "in"),
      bytesOf("planned_decode", "decode host", "out"),
      bytesOf("planned_relay", "third host", "third"),
    ],
    empty: "No load was planned in the last hour. Loads are planned if only other hosts' storage holds some of their blocks, and the engine's host runs a node.",
    cluster: true,
  },
  {
    id: "fill",
    top: 1,
    shown: (value) => `${value * 100} %`,
    now: percent,
    series: [
      { name: "DRAM", style: "in", of: (point) => fillOf(point.dram) },
      { name: "NVMe", style: "out", of: (point) => fillOf(point.nvme) },
    ],
    empty: "No node has reported its fill yet. The first figure appears 10 s after a node starts.",
  },
  {
    id: "evictions",
    shown: (value) => `${value < 10 ? value.toFixed(1) : Math.round(value)}/s`,
    series: [
      { name: "from DRAM", style: "in", of: (point) => perSecond(point.evicted_dram_blocks, point) },
      { name: "from NVMe", style: "out", of: (point) => perSecond(point.evicted_nvme_blocks, point) },
    ],
    empty: "No evictions in the last hour. Blocks are evicted when a tier is full; their number appears here within 10 s.",
  },
];

function showCharts() {
  for (const one of CHARTS) {
    $(one.id).closest("section").hidden = shownNode !== null && Boolean(one.cluster);
    if (!known.history) notYet(one.id, "history");
    else drawChart(one);
  }
}

/** Nodes whose figures are missing in the charts of the whole store. */
function missingNodes() {
  const names = known.history.unreached.filter((one) => one.kind !== "unsupported").map((one) => one.node_id);
  if (shownNode !== null || !names.length) return null;
  const more = names.length > NAMED_NODES ? ` and ${count(names.length - NAMED_NODES)} more` : "";
  return note(`without ${names.slice(0, NAMED_NODES).join(", ")}${more}`);
}

function drawChart({ id, top, shown, now = shown, series, empty, cluster }) {
  const points = history.points.map((point) => ({ at_s: point.at_s, values: series.map(({ of }) => of(point)) }));
  const worst = Math.max(0, ...points.flatMap((point) => point.values.map((value) => value ?? 0)));
  const any = points.some((point) => point.values.some((value) => value !== null)) && (top === 1 || worst > 0);
  const silent = known.history.unreached.some((one) => one.node_id === shownNode);
  const missing = cluster ? null : missingNodes();
  if (!any && silent) return show($(id), quiet("Not known: the node does not answer."));
  if (!any) return show($(id), quiet(empty), missing, stale("history"));
  const last = [...points].reverse().find((point) => point.values.some((value) => value !== null));
  const drawn = series.map((one, which) => ({ ...one, now: last.values[which] === null ? "—" : now(last.values[which]) }));
  const label = drawn.map((one) => `${one.name} ${one.now}`).join(", ");
  const title = $(id).closest("section").querySelector("h2").firstChild.data.trim();
  const said = `${title}, last hour; at ${clock(new Date(last.at_s * 1000))}: ${label}`;
  const drawing = chart(points, drawn, top ?? ceiling(worst), (value) => (value ? shown(value) : "0"), said, serverNow());
  const begun = points.length < 3 ? quiet(`The first figures: a point is added every ${HISTORY_STEP_S} s.`) : null;
  show($(id), drawing, missing, begun, stale("history"));
}

// ---- timeline ----
function showTimeline() {
  if (!known.history && !failed.history) return notYet("timeline", "history");
  const end_s = serverNow();
  const here = (one) => shownNode === null || one.node === shownNode;
  const faults = groupFaults(history.faults);
  const events = history.events.map(eventEntry);
  const entries = [...faults, ...events].filter(here).sort((one, other) => other.at_s - one.at_s);
  show(
    $("timeline"),
    marksOverTime(
      entries.map(({ at_s, fault }) => ({ at_s, style: fault ? "full" : "in" })),
      `${many(faults.filter(here).length, "fault", "faults")} and ${many(events.filter(here).length, "event", "events")}`,
      end_s,
    ),
    entries.length
      ? table(
          "events and faults",
          [["time", "whole"], ["subject"], ["event or fault", "wide"], ["times", "number"]],
          entries.slice(0, TIMELINE_ROWS).map((one) => ({
            key: one.key,
            cells: [
              [timeOf(one.at_s), second(ago(Math.max(0, end_s - one.at_s)))],
              one.subject ?? one.node ?? "metadata server",
              [one.fault ? h("span", { class: "badge bad" }, "fault") : one.code ? h("code", {}, one.code) : null, " ", one.what],
              one.count === null ? "" : count(one.count),
            ],
          })),
        )
      : quiet("No events. Starts, stops and failures of nodes, findings, orders of operators and counted faults appear here."),
    entries.length > TIMELINE_ROWS
      ? note(`The newest ${TIMELINE_ROWS} of ${count(entries.length)}. All: /v1/cluster-events and /v1/history.`)
      : null,
    stale("history", "events"),
  );
}

/** One entry per process, kind of fault and minute, so that a continuous fault does not fill the list. */
function groupFaults(faults) {
  const grouped = new Map();
  for (const one of faults) {
    const key = `${one.node_id} ${one.metric} ${Math.floor(one.at_s / 60)}`;
    const before = grouped.get(key);
    if (before) before.count += one.count;
    else grouped.set(key, { key, at_s: one.at_s, node: one.node_id, what: one.what, count: one.count, fault: true });
  }
  return [...grouped.values()];
}

function eventEntry(one) {
  const by = one.who ? ` (by ${one.who})` : "";
  const node = one.subject?.split("/")[0] ?? null;
  return { key: one.id, at_s: one.at_s, node, subject: one.subject, code: one.code, what: `${one.text}${by}`, count: null };
}

/** Time of day; with the day if it is not today. */
function timeOf(at_s) {
  const date = new Date(at_s * 1000);
  const today = date.toDateString() === new Date().toDateString();
  return today ? clock(date) : `${date.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${clock(date)}`;
}
