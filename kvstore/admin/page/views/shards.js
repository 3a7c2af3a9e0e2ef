// Servers of the Valkey Cluster that holds the index, and the metadata servers that serve it.

const SHARD_COLUMNS = [["server"], ["shard"], ["state"], ["memory"], ["keys", "number"], ["version"]];
const SERVING_COLUMNS = [["metadata server"], ["roles"], ["version"], ["up", "number"]];
const NEARLY_FULL = 0.9;

/** Whether the index is in a Valkey Cluster. With an index that is a file of one host there are none to show. */
const isShared = () => (known.shards?.servers.length ?? 0) > 0;

function showShards() {
  $("shards-section").hidden = !isShared() || shownNode !== null;
  if (!isShared()) return;
  const { servers, unserved_slots: unserved, lost_ranges: lost, suspect_ranges: suspect, metadata_servers: serving } = known.shards;
  show(
    $("shards"),
    table("servers of the index", SHARD_COLUMNS, servers.map(shardRow)),
    unserved ? h("p", { class: "note bad" }, `${many(unserved, "hash slot has", "hash slots have")} no server.`) : null,
    lost ? h("p", { class: "note bad" }, `${many(lost, "key range is", "key ranges are")} lost until nodes have sent their blocks again.`) : null,
    suspect ? h("p", { class: "note" }, `${many(suspect, "key range is", "key ranges are")} suspect: nodes compare them first.`) : null,
    table("metadata servers", SERVING_COLUMNS, serving.map(servingRow)),
    stale("shards"),
  );
}

function shardRow(one) {
  const [state, tone] = one.away_s === null ? ["answers", "ok"] : [`away for ${seconds(one.away_s)}`, "bad"];
  return {
    key: one.address,
    cells: [
      h("code", {}, one.address),
      one.shard === null ? "none" : [`${one.shard} · ${one.primary ? "primary" : "replica"}`, second(shardFacts(one))],
      h("span", { class: `badge ${tone}` }, state),
      shardMemory(one),
      one.keys === null ? "—" : count(one.keys),
      one.version ?? "—",
    ],
  };
}

function shardFacts(one) {
  if (one.primary) return `${count(one.slots)} slots, ${many(one.replicas, "replica answers", "replicas answer")}`;
  return one.lag_bytes === null ? "lag not known" : `${bytes(one.lag_bytes)} behind`;
}

/** Used memory and its limit, with settings that endanger the index. */
function shardMemory(one) {
  if (one.used_bytes === null) return "—";
  const evicts = one.eviction_policy !== null && one.eviction_policy !== "noeviction";
  const warned = [
    evicts ? `evicts: ${one.eviction_policy}` : null,
    one.snapshots ? "writes snapshots" : null,
    one.append_only ? "writes an append-only file" : null,
  ].filter((text) => text !== null);
  const warning = warned.length ? h("span", { class: "small warn second" }, warned.join(", ")) : null;
  if (!one.limit_bytes) return [bytes(one.used_bytes), second("no limit"), warning];
  const share = one.used_bytes / one.limit_bytes;
  const said = `${bytes(one.used_bytes)} of ${bytes(one.limit_bytes)}`;
  return [
    h("span", { class: "held" }, bar(share, `memory of ${one.address}: ${said}`, share > NEARLY_FULL), h("span", { class: "small" }, said)),
    warning,
  ];
}

function servingRow(one) {
  const up = Math.max(0, serverNow() - one.started_s);
  return {
    key: one.server_id,
    cells: [[h("code", {}, one.address), one.answers_here ? second("answers this page") : null], one.roles.join(", ") || "—", one.version, seconds(up)],
  };
}
