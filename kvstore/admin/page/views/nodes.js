// List of nodes: filter, sort, and links to the view of one node.

const STATES = {
  active: "active",
  draining: "draining",
  drained: "drained: may be stopped",
  drain_blocked: "drain is blocked",
};
const LOADED = { dram: "local DRAM", nvme: "local NVMe", peer: "other nodes" };
const rates = new Rates();
const flows = new Map(); // node and link or path -> History of {received, sent} per second

/** Node of the view in the address (#node/ID); null: the whole store. */
let shownNode = null;

// ---- rates, after each round ----
function updateRates(now) {
  if (!failed.namespaces)
    for (const one of known.namespaces.items) one.asked_rate = rates.of(`asked ${one.namespace_id}`, one.asked_blocks, now);
  if (failed.activity) return;
  for (const node of known.activity.items) {
    for (const link of node.links) flow(`${node.node_id} ${link.network}`, link.received_bytes, link.sent_bytes, now);
    const plane = node.data_plane;
    flow(`${node.node_id} readers`, plane.taken_bytes, plane.served_bytes, now);
    flow(`${node.node_id} peers`, plane.fetched_bytes, plane.written_bytes, now);
    for (const from of Object.keys(LOADED)) flow(`${node.node_id} loads ${from}`, null, node.loaded[from], now);
  }
}

/** received: null for a flow in one direction. */
function flow(name, received, sent, now) {
  if (!flows.has(name)) flows.set(name, new History(SPARKS));
  const came = received === null ? null : rates.of(`${name} in`, received, now);
  flows.get(name).add({ received: came, sent: rates.of(`${name} out`, sent, now) });
}

const lastFlow = (name) => flows.get(name)?.values.at(-1) ?? { received: null, sent: null };

// ---- the table ----
function nodeState(node) {
  if (failed.nodes) return ["state not known", "quiet"];
  if (node.refused !== null) return ["refused", "bad"];
  if (node.stopped && !node.alive) return ["stopped", "quiet"];
  if (!node.alive) return [`no report for ${seconds(node.heartbeat_age_s)}`, "bad"];
  return [STATES[node.state], node.state === "active" ? "ok" : node.state === "drain_blocked" ? "bad" : "warn"];
}

function fillOfNode(id, tier) {
  const mine = (known.volumes?.items ?? []).filter((one) => one.node_id === id && one.tier === tier);
  const sum = (name) => mine.reduce((total, one) => total + one[name], 0);
  const failing = mine.some((one) => one.read_only !== null);
  return mine.length ? { used: sum("used_bytes"), capacity: sum("capacity_bytes"), failing } : null;
}

function rowOfNode(node) {
  const id = node.node_id;
  const links = new Set((activityOf(id)?.links ?? []).map((link) => link.network));
  const sum = (which) => [...links].reduce((total, link) => total + (lastFlow(`${id} ${link}`)[which] ?? 0), 0);
  const loaded = Object.keys(LOADED).reduce((total, from) => total + (lastFlow(`${id} loads ${from}`).sent ?? 0), 0);
  const [state, tone] = nodeState(node);
  return {
    node,
    id,
    state,
    tone,
    dram: fillOfNode(id, "dram"),
    nvme: fillOfNode(id, "nvme"),
    received: links.size ? sum("received") : null,
    sent: links.size ? sum("sent") : null,
    loaded,
    found: findingsOf(id).length,
    p99: known.history?.load_by_node[id]?.p99_s ?? null,
  };
}

const activityOf = (id) => known.activity?.items.find((one) => one.node_id === id);
const aboutNode = (finding, id) => finding.subject === id || Boolean(finding.subject?.startsWith(`${id}/`));
const findingsOf = (id) => (known.cluster?.findings ?? []).filter((one) => aboutNode(one, id));
const shareOf = (fill) => (fill?.capacity ? fill.used / fill.capacity : -1);

const NODE_COLUMNS = [
  { name: "node", of: (row) => row.id },
  { name: "state", of: (row) => `${["bad", "warn", "quiet", "ok"].indexOf(row.tone)} ${row.state}` },
  { name: "findings", kind: "number", of: (row) => -row.found },
  { name: "DRAM", of: (row) => -shareOf(row.dram) },
  { name: "NVMe", of: (row) => -shareOf(row.nvme) },
  { name: "network in ↓", kind: "number", of: (row) => -(row.received ?? -1) },
  { name: "network out ↑", kind: "number", of: (row) => -(row.sent ?? -1) },
  { name: "loaded", kind: "number", of: (row) => -row.loaded },
  { name: "p99 load", kind: "number", of: (row) => -(row.p99 ?? -1) },
];
const nodeOrder = { column: "node", reverse: false };
const NATURAL = new Intl.Collator("en", { numeric: true });
const compare = (one, other) => (typeof one === "number" ? one - other : NATURAL.compare(one, other));

function showNodes() {
  if (shownNode !== null) return showNode();
  if (!known.nodes) return notYet("nodes", "nodes");
  const wanted = $("nodes-filter").value.trim().toLowerCase();
  const rows = known.nodes.items.map(rowOfNode);
  const text = ({ id, state, node }) => `${id} ${state} ${node.roles.join(" ")}`.toLowerCase();
  const found = rows.filter((row) => wanted.split(/\s+/).every((word) => text(row).includes(word)));
  const { of } = NODE_COLUMNS.find(({ name }) => name === nodeOrder.column);
  found.sort((one, other) => (nodeOrder.reverse ? -1 : 1) * compare(of(one), of(other)) || NATURAL.compare(one.id, other.id));
  $("nodes-filter").closest("p").hidden = rows.length < 2;
  show(
    $("nodes"),
    !rows.length
      ? quiet("No node has registered. Start one on each host with `kvstore node`; it appears here within seconds.")
      : found.length
        ? table("nodes", NODE_COLUMNS.map(columnHead), found.map(nodeRow))
        : quiet(`No node matches “${wanted}”.`),
    found.length < rows.length ? note(`${found.length} of ${many(rows.length, "node", "nodes")}.`) : null,
    known.nodes.hidden > 0
      ? note(`${many(known.nodes.hidden, "node is", "nodes are")} not shown. All nodes: /v1/nodes.`)
      : null,
    notQueried(),
    stale("nodes", "activity", "volumes"),
  );
}

/** Nodes that report to the metadata server and do not answer this server. */
function notQueried() {
  const alive = new Set(known.nodes.items.filter((one) => one.alive).map((one) => one.node_id));
  const silent = (known.activity?.unreached ?? []).filter((one) => one.kind !== "unsupported" && alive.has(one.node_id));
  if (!silent.length) return null;
  const names = silent.map((one) => `${one.node_id} (${one.detail})`).join(", ");
  return note(
    `No figures of ${names}: no answer to the admin server. Check the network from it to the control address of the node,` +
      " and [client.tls] of the admin server.",
  );
}

function columnHead({ name, kind }) {
  const order = nodeOrder.column !== name ? "none" : nodeOrder.reverse ? "descending" : "ascending";
  const mark = { none: "", ascending: " ▴", descending: " ▾" }[order];
  const button = h(
    "button",
    { type: "button", class: "plain", "data-do": "sort", "data-column": name, "data-order": order },
    `${name}${mark}`,
  );
  return [name, kind, button];
}

function nodeRow(row) {
  const { id, node } = row;
  return {
    key: id,
    cells: [
      [h("a", { href: `#node/${part(id)}` }, id), second(node.roles.join(" · "))],
      h("span", { class: `badge ${row.tone}` }, row.state),
      row.found ? h("b", { class: "bad" }, count(row.found)) : "0",
      fillCell(row.dram, `DRAM of ${id}`),
      fillCell(row.nvme, `NVMe of ${id}`),
      rate(row.received),
      rate(row.sent),
      node.alive ? rate(row.loaded) : "—",
      seconds(row.p99),
    ],
  };
}

function fillCell(fill, name) {
  if (fill === null) return h("span", { class: "quiet" }, "none");
  const share = shareOf(fill);
  const said = `${percent(share)} of ${bytes(fill.capacity)}`;
  return h("span", { class: "held" }, bar(share, `${name}: ${said}`, fill.failing), h("span", { class: "small" }, said));
}

Object.assign(ACTS, {
  sort({ column }) {
    nodeOrder.reverse = nodeOrder.column === column && !nodeOrder.reverse;
    nodeOrder.column = column;
    showNodes();
  },
});
