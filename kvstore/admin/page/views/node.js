// View of one node: state, findings, traffic, volumes, and the orders that it accepts.

const NO_FIGURES = "No figures: the node does not answer.";

/** Show the view that the address names, and hide the sections of the other. */
function route() {
  const found = /^#node\/(.+)$/.exec(location.hash);
  const before = shownNode;
  try {
    shownNode = found ? decodeURIComponent(found[1]) : null;
  } catch {
    shownNode = null;
  }
  for (const section of document.querySelectorAll("[data-view]"))
    section.hidden = section.dataset.view !== (shownNode === null ? "cluster" : "node");
  show($("node-title"), shownNode === null ? "" : `Node ${shownNode}`);
  document.title = shownNode === null ? "kvstore" : `${shownNode} · kvstore`;
  if (before !== shownNode) {
    window.scrollTo(0, 0);
    if (shownNode !== null) $("one").focus();
  }
}

function showNode() {
  if (!known.nodes) return notYet("node", "nodes");
  const node = known.nodes.items.find((one) => one.node_id === shownNode);
  if (node === undefined)
    return show($("node"), quiet("No node with this name is registered. Its name may have changed, or it was removed."));
  const volumes = (known.volumes?.items ?? []).filter((one) => one.node_id === node.node_id);
  show($("node"), nodeCard(node, activityOf(node.node_id), volumes), stale("nodes", "activity", "volumes"));
}

function nodeCard(node, activity, volumes) {
  const [state, tone] = nodeState(node);
  const id = node.node_id;
  const drains = node.drain !== null;
  const order = drains ? "Undrain" : "Drain";
  const found = findingsOf(id);
  return h(
    "article",
    { class: node.alive ? "node" : "node off", "data-key": id, "aria-label": `node ${id}` },
    h(
      "div",
      { class: "head" },
      h("span", { class: `badge ${tone}` }, state),
      h("span", { class: "quiet small" }, node.roles.join(" · ")),
      h("span", { class: "quiet small" }, node.control_address),
    ),
    found.length ? h("ul", { class: "problems" }, found.map(findingItem)) : null,
    node.refused === null || failed.nodes || found.length
      ? null
      : h("p", { class: "small bad" }, `The metadata server refuses it: ${node.refused}.`),
    drains ? drainLine(node.drain) : null,
    h(
      "div",
      { class: "tools" },
      nodeButton(drains ? "undrain" : "drain", id, `${order} …`, `${order} node ${id} …`),
      node.alive && activity ? nodeButton("traffic-cap", id, "Traffic cap …", `Traffic cap of node ${id} …`) : null,
      node.alive && activity ? nodeButton("compare", id, "Check index …", `Check the index of node ${id} …`) : null,
    ),
    h(
      "div",
      { class: "parts" },
      h(
        "div",
        { class: "part" },
        flowHeads("network throughput, all traffic"),
        links(node, activity),
        flowHeads("KV data over the network"),
        flowRow(
          `${id} readers`,
          ["served to engines and nodes", second("in: written by them")],
          `engines and nodes that read from node ${id} or write to it`,
        ),
        flowRow(
          `${id} peers`,
          ["peer traffic", second("in: read, out: written")],
          `peer traffic of node ${id}: read from and written to other nodes`,
        ),
        h("h4", {}, "loads of engines on this host, by source"),
        activity ? loadRows(id, activity) : h("p", { class: "quiet small" }, NO_FIGURES),
        activity?.read_ahead.read_bytes || activity?.read_ahead.refused ? readAheadLine([activity]) : null,
      ),
      h(
        "div",
        { class: "part" },
        h("h4", {}, "volumes"),
        volumes.map(volumeRow),
        volumes.length ? null : h("p", { class: "quiet small" }, "The node has not reported its volumes."),
      ),
    ),
    activity?.hints.length ? hintRows(id, activity.hints) : null,
  );
}

/** Hints about sessions at a node, by tenant. */
const hintRows = (id, hints) => [
  h("h4", {}, "hints about sessions"),
  table(
    `hints at node ${id}`,
    [["tenant", "wide"], ["sessions", "number"], ["protected", "number"], ["keep / end hints", "number"], ["over the limit", "number"], ["dropped", "number"]],
    hints.map((one) => ({
      key: one.tenant,
      cells: [
        tenantName(one.tenant),
        count(one.sessions),
        bytes(one.protected_bytes),
        `${count(one.keeps)} / ${count(one.ends)}`,
        many(one.beyond_limit_blocks, "block", "blocks"),
        many(one.dropped_blocks, "block", "blocks"),
      ],
    })),
  ),
];

const flowHeads = (label) =>
  h(
    "div",
    { class: "row heads" },
    h("span", {}, label),
    h("span", { class: "number in" }, "in ↓"),
    h("span", { class: "number out" }, "out ↑"),
  );

const nodeButton = (what, node, text, label) =>
  h("button", { type: "button", "data-do": what, "data-node": node, "aria-label": label }, text);

/** One row for DRAM, and one for each other source of loads since the node started. */
function loadRows(id, activity) {
  return Object.entries(LOADED)
    .filter(([from]) => from === "dram" || activity.loaded[from])
    .map(([from, label]) => flowRow(`${id} loads ${from}`, label, `loads at node ${id} from ${label}`, 0, true));
}

/** What nodes read ahead since they started. */
function readAheadLine(activities) {
  const sum = (name) => activities.reduce((total, one) => total + one.read_ahead[name], 0);
  const refused = sum("refused");
  const said = `${bytes(sum("read_bytes"))} were read ahead of loads, ${bytes(sum("unused_bytes"))} of them not used`;
  return h("p", { class: "small" }, `${said}${refused ? `; ${many(refused, "call", "calls")} refused` : ""}.`);
}

function drainLine(drain) {
  const said = [];
  if (drain.waiting_blocks) said.push(`${many(drain.waiting_blocks, "block waits", "blocks wait")} to become durable`);
  if (drain.move) said.push(`${many(drain.moved_blocks, "block", "blocks")} moved, ${count(drain.left_blocks)} left`);
  if (drain.not_durable_blocks) said.push(`${many(drain.not_durable_blocks, "block", "blocks")} would be lost if the node stopped now`);
  if (drain.why) said.push(drain.why);
  return said.length ? h("p", { class: "small warn" }, `${said.join("; ")}.`) : null;
}

function links(node, activity) {
  const shown = new Set((activity?.links ?? []).map((link) => link.network));
  if (!shown.size)
    return h(
      "p",
      { class: "quiet small" },
      activity ? "Traffic is not measured: the data plane listens on all addresses." : NO_FIGURES,
    );
  return node.nics
    .filter((nic) => shown.has(nic.network))
    .map((nic) => {
      const both = shown.size === 1;
      const most = nic.configured_bytes_per_s;
      const name = both ? "storage + compute" : nic.network;
      const local = /^(127\.|\[::1\]|localhost:)/.test(nic.address) ? ", loopback with other programs" : "";
      return flowRow(
        `${node.node_id} ${nic.network}`,
        [name, local || most ? h("span", { class: "quiet" }, `${local}${most ? ` ${rate(most)}` : ""}`) : null],
        `${name} link of node ${node.node_id}`,
        most,
      );
    });
}

/** outward: the flow has one direction. */
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
    volume.read_only
      ? h("p", { class: "small bad" }, `Stores nothing: ${volume.read_only}. It still serves its blocks; new ones stay in DRAM only.`)
      : null,
    volume.arriving ? h("p", { class: "small" }, "Inventory arriving at the metadata server: some blocks are not found yet.") : null,
    volume.quarantined_blocks
      ? h("p", { class: "small warn" }, `${many(volume.quarantined_blocks, "block", "blocks")} failed verification and are not used`)
      : null,
  ];
}

const volumeButton = (what, volume, text, label) =>
  h("button", { type: "button", "data-do": what, "data-volume": volume.volume_id, "aria-label": label }, text);
