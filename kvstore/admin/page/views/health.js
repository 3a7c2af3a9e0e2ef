// Present findings, and the figures of the whole store.

/** The code of a finding, as a link to its documentation, which this server has. */
function findingCode(one) {
  if (!one.docs) return h("code", { class: "code" }, one.code);
  return h("a", { class: "code mono", href: one.docs, target: "_blank", title: `what ${one.code} means, and what to do` }, one.code);
}

function findingItem(one) {
  return h(
    "li",
    { class: one.severity, "data-key": `${one.code} ${one.subject}` },
    h("p", {}, findingCode(one), " ", one.facts),
    one.action ? h("p", { class: "small" }, h("b", {}, "Do: "), one.action) : null,
  );
}

function showHealth() {
  const cluster = known.cluster;
  if (!cluster) return notYet("problems", "cluster");
  const found = cluster.findings;
  const well = `No problems: ${many(cluster.nodes_alive, "node answers", "nodes answer")}, and all volumes accept blocks.`;
  const start = "No node has registered yet. Start one on each host with `kvstore node`; it appears here within seconds.";
  const isWell = cluster.health === "ok";
  show(
    $("problems"),
    isWell ? (failed.cluster ? quiet("Not known now.") : h("p", { class: "well" }, cluster.nodes_alive ? well : start)) : null,
    found.length ? h("ul", { class: "problems" }, found.map(findingItem)) : null,
    stale("cluster"),
  );
  showTiles(cluster);
  $("whole").hidden = false;
  show(
    $("where"),
    "metadata server ",
    metadataServers(cluster),
    ` · version ${cluster.metadata_version} · up ${seconds(cluster.metadata_uptime_s)}`,
  );
}

/** The metadata servers: the address of one, or each with its state. */
function metadataServers(cluster) {
  const servers = cluster.metadata_servers;
  if (servers.length < 2) return h("code", {}, cluster.metadata_address);
  const stateOf = (one) => (one.state === "usable" ? (one.used ? "in use" : "ready") : one.state.replace("_", " "));
  return servers.flatMap((one, index) => [index ? ", " : "", h("code", {}, one.address), ` (${stateOf(one)})`]);
}

function showTiles(cluster) {
  const tile = (name, value, more) => h("div", {}, h("dt", {}, name), h("dd", {}, value, more ? h("small", {}, more) : null));
  const ratio = newest((point) => point.hit_ratio);
  const load = newest((point) => point.load);
  const last = newest((point) => point.at_s);
  const arriving = (known.volumes?.items ?? []).some((one) => one.arriving);
  const rateOf = last?.load ? perSecond(last.load.count, last) : 0;
  show($("summary"), [
    tile("nodes", ...nodesTile(cluster)),
    tile("blocks in the index", count(cluster.index_blocks), arriving ? "inventories arriving" : bytes(cluster.index_bytes)),
    tile("hit ratio", ratio ? percent(ratio.hit_ratio) : "—", ratio ? asOf(ratio) : "no lookups in the last minute"),
    tile("loads per second", last ? rateOf.toFixed(rateOf < 10 ? 1 : 0) : "—", last ? asOf(last) : "first figure after 10 s"),
    tile("p95 load", load ? seconds(load.load.p95_s) : "—", load ? asOf(load) : "no loads in the last minute"),
    tile("active plans", count(cluster.live_plans), `policy ${cluster.path_policy.replaceAll("_", " ")}`),
  ]);
}

/** The interval of a figure: the last ten seconds, or an earlier time. */
const asOf = (point) => (point.at_s > serverNow() - 25 ? "last 10 s" : `at ${clock(new Date(point.at_s * 1000))}`);

function nodesTile(cluster) {
  if (failed.cluster) return ["?", `${many(cluster.nodes_alive, "was", "were")} alive`];
  const not = [
    cluster.nodes_refused ? `${count(cluster.nodes_refused)} refused` : "",
    cluster.nodes_silent ? `${count(cluster.nodes_silent)} silent` : "",
  ].filter(Boolean);
  return [count(cluster.nodes_alive), not.join(", ") || "alive"];
}
