// What is wrong, the figures of the whole, and the map of nodes.

const rates = new Rates();
const flows = new Map(); // node and link or path -> History of {received, sent} a second
const ratios = new History(900);
const latencies = new History(900);
const REACHES = { dram: "DRAM", nvme: "own volumes", peer: "other nodes", none: "no hit" };
const LOADED = { dram: "DRAM", nvme: "volumes", peer: "other nodes" };
const STATES = { active: "active", draining: "draining", drained: "drained: may be stopped", drain_blocked: "drain is blocked" };

let recentLoads = null; // of the last look: {rate, p50, p95}
let lastRatio = null;

// ---- after each look ----
function reckon(now) {
  if (!failed.activity) reckonActivity(now);
  if (!failed.namespaces) {
    const items = known.namespaces.items;
    const total = (name) => items.reduce((sum, one) => sum + one[name], 0);
    const asked = rates.of("asked", total("asked_blocks"), now);
    const hit = rates.of("hit", total("hit_blocks"), now);
    for (const one of items) one.asked_rate = rates.of(`asked ${one.namespace_id}`, one.asked_blocks, now);
    const ratio = asked && hit !== null ? Math.min(1, hit / asked) : null;
    if (ratio !== null) lastRatio = ratio;
    ratios.add({ at: now, values: [ratio] });
  }
}

function reckonActivity(now) {
  const merged = new Map();
  for (const node of known.activity.items) {
    for (const link of node.links) flow(`${node.node_id} ${link.network}`, link.received_bytes, link.sent_bytes, now);
    const plane = node.data_plane;
    flow(`${node.node_id} readers`, plane.taken_bytes, plane.served_bytes, now);
    flow(`${node.node_id} peers`, plane.fetched_bytes, plane.written_bytes, now);
    for (const from of Object.keys(LOADED)) flow(`${node.node_id} loads ${from}`, null, node.loaded[from], now);
    for (const load of node.loads) {
      for (const bucket of load.buckets) {
        const found = rates.of(`load ${node.node_id} ${load.reach} ${bucket.up_to_s}`, bucket.loads, now);
        if (found !== null) merged.set(bucket.up_to_s, (merged.get(bucket.up_to_s) || 0) + found);
      }
    }
  }
  const buckets = [...merged].sort((one, other) => (one[0] ?? Infinity) - (other[0] ?? Infinity));
  const sum = buckets.reduce((total, [, value]) => total + value, 0);
  const p95 = quantile(buckets, sum, 0.95);
  recentLoads = { rate: sum, p50: quantile(buckets, sum, 0.5), p95, over: below(buckets, p95) };
  latencies.add({ at: now, values: [recentLoads.p50, recentLoads.p95] });
}

/** received: null where it goes one way only. */
function flow(name, received, sent, now) {
  if (!flows.has(name)) flows.set(name, new History(SPARKS));
  const came = received === null ? null : rates.of(`${name} in`, received, now);
  flows.get(name).add({ received: came, sent: rates.of(`${name} out`, sent, now) });
}

/** The upper bound of the bucket in which it lies; of the last one, twice the bound before it. */
function quantile(buckets, sum, part) {
  let seen = 0;
  for (const [at, [bound, value]] of buckets.entries()) {
    seen += value;
    if (value && seen >= sum * part) return bound ?? (at ? buckets[at - 1][0] * 2 : null);
  }
  return null;
}

/** The lower end of the bucket whose upper bound it is; of the first one, none. */
function below(buckets, bound) {
  const bounds = buckets.map(([one]) => one).filter((one) => one !== null && bound !== null && one < bound);
  return bounds.length ? Math.max(...bounds) : null;
}

// ---- health ----
function showHealth() {
  const cluster = known.cluster;
  if (!cluster) {
    notYet("problems", "cluster");
    return;
  }
  const problems = [...cluster.problems];
  for (const one of known.activity?.unreached ?? []) {
    if (one.kind !== "unsupported" && isAlive(one.node_id))
      problems.push(`node ${one.node_id} does not say what it does: ${one.detail}`);
  }
  show(
    $("problems"),
    problems.length
      ? h(
          "ul",
          { class: "problems" },
          problems.map((text) => h("li", {}, text)),
        )
      : failed.cluster
        ? quiet("Not known now.")
        : h(
            "p",
            { class: "well" },
            `Nothing: ${many(cluster.nodes_alive, "node answers", "nodes answer")}, and all volumes take blocks.`,
          ),
    stale("cluster"),
  );
  const load = recentLoads;
  const tile = (name, value, more) => [h("dt", {}, name), h("dd", {}, value, more ? h("small", {}, more) : null)];
  show(
    $("summary"),
    [
      tile("nodes", ...nodesTile(cluster)),
      tile("blocks in the index", count(cluster.index_blocks), bytes(cluster.index_bytes)),
      tile("hit ratio", percent(lastRatio), "last lookups"),
      tile("loads", load?.rate ? load.rate.toFixed(load.rate < 10 ? 1 : 0) : "0", "a second"),
      tile("p95 load", load?.p95 ? `≤ ${seconds(load.p95)}` : "—", load?.p95 ? over(load.over) : "no loads"),
      tile("active plans", count(cluster.live_plans), `policy ${cluster.path_policy.replaceAll("_", " ")}`),
    ].map((pair) => h("div", {}, pair)),
  );
  $("whole").hidden = false;
  show(
    $("where"),
    "metadata ",
    h("code", {}, cluster.metadata_address),
    ` · version ${cluster.metadata_version} · up ${seconds(cluster.metadata_uptime_s)}`,
  );
}

/** Of the bucket in which a time lies, the other end: the time was not measured any closer. */
const over = (bound) => (bound ? `> ${seconds(bound)}` : null);

function nodesTile(cluster) {
  if (failed.cluster) return ["?", `${many(cluster.nodes_alive, "was", "were")} alive`];
  const not = [
    cluster.nodes_refused ? `${count(cluster.nodes_refused)} refused` : "",
    cluster.nodes_silent ? `${count(cluster.nodes_silent)} silent` : "",
  ].filter(Boolean);
  return [count(cluster.nodes_alive), not.join(", ") || "alive"];
}

const isAlive = (id) => known.nodes?.items.some((node) => node.node_id === id && node.alive) ?? false;

// ---- the map ----
function showNodes() {
  if (!known.nodes) return notYet("nodes", "nodes");
  const items = known.nodes.items;
  const act = new Map((known.activity?.items ?? []).map((one) => [one.node_id, one]));
  const volumes = known.volumes?.items ?? [];
  show(
    $("nodes"),
    items.length
      ? h(
          "div",
          { class: "nodes" },
          items.map((node) =>
            nodeCard(
              node,
              act.get(node.node_id),
              volumes.filter((one) => one.node_id === node.node_id),
            ),
          ),
        )
      : quiet("No node has registered: kvstore node starts one."),
    known.nodes.hidden > 0
      ? note(
          `${many(known.nodes.hidden, "node is", "nodes are")} not shown, nor asked for loads and faults; /v1/nodes has them all.`,
        )
      : null,
    stale("nodes", "activity", "volumes"),
  );
}

function nodeState(node) {
  if (failed.nodes) return ["state not known", "quiet"];
  if (node.refused !== null) return ["refused", "bad"];
  if (node.stopped && !node.alive) return ["stopped", "quiet"];
  if (!node.alive) return [`no report for ${seconds(node.heartbeat_age_s)}`, "bad"];
  return [STATES[node.state], node.state === "active" ? "ok" : node.state === "drain_blocked" ? "bad" : "warn"];
}

function nodeCard(node, activity, volumes) {
  const [state, tone] = nodeState(node);
  const id = node.node_id;
  const drains = node.drain !== null;
  return h(
    "article",
    { class: node.alive ? "node" : "node off", "data-key": id, "aria-label": `node ${id}` },
    h(
      "div",
      { class: "head" },
      h("h3", {}, id),
      h("span", { class: `badge ${tone}` }, state),
      h("span", { class: "quiet small" }, node.roles.join(" · ")),
      h(
        "button",
        {
          type: "button",
          "data-do": drains ? "undrain" : "drain",
          "data-node": id,
          "aria-label": `${drains ? "Undrain" : "Drain"} node ${id} …`,
        },
        drains ? "Undrain …" : "Drain …",
      ),
    ),
    node.refused === null || failed.nodes ? null : h("p", { class: "small bad" }, `The metadata server refuses it: ${node.refused}.`),
    drains ? drainLine(node.drain) : null,
    h(
      "div",
      { class: "part" },
      h(
        "div",
        { class: "row heads" },
        h("span", {}, "links, all traffic"),
        h("span", { class: "number in" }, "in ↓"),
        h("span", { class: "number out" }, "out ↑"),
      ),
      links(node, activity),
    ),
    h(
      "div",
      { class: "part" },
      h("h4", {}, "loads of engines here, by where the blocks lay"),
      activity ? loadRows(id, activity) : h("p", { class: "quiet small" }, "No figures: it does not say."),
    ),
    h(
      "div",
      { class: "part" },
      h("h4", {}, "data plane, KV payload (not shared memory)"),
      flowRow(`${id} readers`, "engines, nodes", `written here, and read here by engines and other nodes, on node ${id}`),
      flowRow(`${id} peers`, "of other nodes", `read from other nodes, and written to them, by node ${id}`),
    ),
    h(
      "div",
      { class: "part" },
      h("h4", {}, "tier fill"),
      volumes.map(volumeRow),
      volumes.length ? null : h("p", { class: "quiet small" }, "no volumes"),
    ),
    node.alive && activity
      ? h(
          "div",
          { class: "tools orders" },
          nodeButton("traffic-cap", id, "Traffic cap …", `Traffic cap of node ${id} …`),
          nodeButton("compare", id, "Check index …", `Check the index of node ${id} …`),
        )
      : null,
  );
}

const nodeButton = (what, node, text, label) =>
  h("button", { type: "button", "data-do": what, "data-node": node, "aria-label": label }, text);

/** One row for DRAM, and one for each other place that loads were brought from since the node's start. */
function loadRows(id, activity) {
  return Object.entries(LOADED)
    .filter(([from]) => from === "dram" || activity.loaded[from])
    .map(([from, label]) => flowRow(`${id} loads ${from}`, label, `loads at node ${id} out of ${label}`, 0, true));
}

function drainLine(drain) {
  const said = [];
  if (drain.waiting_blocks) said.push(`${many(drain.waiting_blocks, "block waits", "blocks wait")} to become durable`);
  if (drain.move) said.push(`${many(drain.moved_blocks, "block", "blocks")} moved, ${count(drain.left_blocks)} left`);
  if (drain.not_durable_blocks) said.push(`${many(drain.not_durable_blocks, "block", "blocks")} would be lost if it ended now`);
  if (drain.why) said.push(drain.why);
  return said.length ? h("p", { class: "small warn" }, `${said.join("; ")}.`) : null;
}

function links(node, activity) {
  const shown = new Set((activity?.links ?? []).map((link) => link.network));
  if (!shown.size)
    return h(
      "p",
      { class: "quiet small" },
      activity ? "The kernel names no link for its addresses." : "No figures: it does not say.",
    );
  return node.nics
    .filter((nic) => shown.has(nic.network))
    .map((nic) => {
      const both = shown.size === 1;
      const most = nic.configured_bytes_per_s;
      const name = both ? "storage + compute" : nic.network;
      return flowRow(
        `${node.node_id} ${nic.network}`,
        [name, most ? h("span", { class: "quiet" }, ` ${rate(most)}`) : null],
        `${name} link of node ${node.node_id}`,
        most,
      );
    });
}

/** outward: it goes one way only. */
function flowRow(name, label, said, most, outward = false) {
  const values = flows.get(name)?.values ?? [];
  const last = values[values.length - 1] ?? { received: null, sent: null };
  const column = (which) => values.map((one) => one[which]);
  const peak = Math.max(most || 1, ...column("received"), ...column("sent"));
  return h(
    "div",
    { class: "row" },
    h("span", {}, label),
    spark(
      column("received"),
      column("sent"),
      peak,
      `${said}: ${outward ? "" : `in ${rate(last.received)}, out `}${rate(last.sent)}`,
    ),
    h("span", { class: "number" }, outward ? "" : rate(last.received)),
    h("span", { class: "number" }, rate(last.sent)),
  );
}

function volumeRow(volume) {
  const share = volume.capacity_bytes ? volume.used_bytes / volume.capacity_bytes : 0;
  const name = volume.volume_id.slice(volume.node_id.length + 1);
  const said = `${bytes(volume.used_bytes)} of ${bytes(volume.capacity_bytes)}`;
  const evicts = volume.tier !== "hbm" && volume.node_alive;
  return [
    h(
      "div",
      { class: "row fill" },
      h("span", {}, name, name.startsWith(volume.tier) ? null : h("span", { class: "quiet" }, ` ${volume.tier}`)),
      h(
        "div",
        {},
        bar(share, `${volume.volume_id} is ${percent(share)} full: ${said}`, volume.read_only !== null),
        h("span", { class: "small" }, said),
      ),
      h(
        "div",
        { class: "tools" },
        checkable(volume) ? volumeButton("check", volume, "Check …", `Check ${volume.volume_id} …`) : null,
        evicts ? volumeButton("evict-volume", volume, "Evict …", `Evict from ${volume.volume_id} …`) : null,
      ),
    ),
    checkLine(volume),
    volume.read_only ? h("p", { class: "small bad" }, `takes no blocks: ${volume.read_only}`) : null,
    volume.quarantined_blocks
      ? h("p", { class: "small warn" }, `${many(volume.quarantined_blocks, "block", "blocks")} proved bad and out of use`)
      : null,
  ];
}

const volumeButton = (what, volume, text, label) =>
  h("button", { type: "button", "data-do": what, "data-volume": volume.volume_id, "aria-label": label }, text);

// ---- over time ----
function showCharts() {
  if (!known.namespaces) notYet("ratio", "namespaces");
  if (!known.activity) notYet("latency", "activity");
  const ratio = ratios.values;
  if (ratio.length) {
    const any = ratio.some((point) => point.values[0] !== null);
    show(
      $("ratio"),
      chart(
        ratio,
        [{ name: "hit ratio", style: "in", now: percent(lastRatio) }],
        1,
        (value) => `${value * 100} %`,
        any ? `hit ratio since this page was opened, last ${percent(lastRatio)}` : "no lookups since this page was opened",
      ),
      any ? null : note("No lookups since this page was opened."),
      stale("namespaces"),
    );
  }
  const times = latencies.values;
  if (times.length) {
    const worst = Math.max(...times.map((point) => point.values[1] ?? 0));
    const last = [...times].reverse().find((point) => point.values[1] !== null);
    const now = (which) => (last ? `≤ ${seconds(last.values[which])}` : "—");
    show(
      $("latency"),
      chart(
        times,
        [
          { name: "median", style: "in", now: now(0) },
          { name: "95th percentile", style: "out", now: now(1) },
        ],
        worst ? ceiling(worst) : 0.01,
        (value) => (value ? seconds(value) : "0"),
        last
          ? `load latency since this page was opened: last median ${now(0)}, 95th percentile ${now(1)}`
          : "no loads since this page was opened",
      ),
      last ? null : note("No loads since this page was opened."),
      stale("activity"),
    );
  }
}
