// Slow loads, namespaces, faults, decisions.

const TOP_NAMESPACES = 20;
const TOP_FAULTS = 25;
const seen = new Map(); // fault -> {node, what, total, before, at}
const watched = new Map(); // what a node or a volume was like at the last look
const happened = new History(50); // changes of those: {at, node, what}

/** What stands where nothing was answered yet. */
function notYet(where, list) {
  const error = failed[list];
  show($(where), quiet(!error ? "asking …" : error.status === 401 ? "A token is required." : "Not known yet."));
}

// ---- loads ----
function showSlow() {
  if (!known.slow) return notYet("slow", "slow");
  const items = known.slow.items;
  const missed = known.slow.unreached.filter((one) => one.kind !== "unsupported");
  show(
    $("slow"),
    items.length
      ? table(
          "the slowest loads of the last minute",
          [["took", "number"], ["ended", "number"], ["node"], ["blocks", "number"], ["why", "wide"], ["request"]],
          items.map((load, at) => ({
            key: `${load.node_id} ${load.request_id} ${at}`,
            cells: [
              h("b", {}, seconds(load.seconds)),
              ago(load.ago_s),
              load.node_id,
              `${count(load.hit_blocks)} of ${count(load.blocks)}`,
              load.reason,
              h("code", {}, load.request_id || "—"),
            ],
          })),
        )
      : quiet("No loads in the last minute."),
    missed.length ? note(`Not heard: ${missed.map((one) => one.node_id).join(", ")}.`) : null,
    stale("slow"),
  );
}

function showDecisions() {
  if (!known.decisions) return notYet("decisions", "decisions");
  const items = known.decisions.items;
  show(
    $("decisions"),
    items.length
      ? table(
          "the last load decisions",
          [["when", "number"], ["policy"], ["for"], ["blocks", "number"], ["reads", "wide"], ["predicted", "number"]],
          items.map((one) => ({
            key: `${one.plan_id} ${one.attempt}`,
            cells: [
              ago(one.ago_s),
              one.policy.replaceAll("_", " "),
              one.decode_node ? `${one.prefill_node} → ${one.decode_node}` : one.prefill_node,
              [count(one.blocks), second(bytes(one.blocks * one.block_bytes))],
              [
                one.parts.map((part_) => `${part_.node_id} ${count(part_.count)} (${part_.side})`).join(", ") || "nobody",
                one.attempt ? second(`planned anew, attempt ${one.attempt + 1}`) : null,
                one.excluded.length ? second(`left out: ${one.excluded.join(", ")}`) : null,
              ],
              seconds(one.predicted_s),
            ],
          })),
        )
      : quiet("No load was planned yet: loads are planned where what they read lies on volumes of several hosts."),
    stale("decisions"),
  );
}

// ---- namespaces ----
function nameOf(namespace) {
  const { spec } = namespace;
  return [
    spec.model || "(no model)",
    spec.tenant ? `tenant ${spec.tenant}` : "",
    spec.weights_epoch ? `weights ${spec.weights_epoch}` : "",
    spec.shard_count > 1 ? `shard ${spec.shard_rank + 1} of ${spec.shard_count}` : "",
  ].filter(Boolean);
}

function showNamespaces() {
  if (!known.namespaces) return notYet("namespaces", "namespaces");
  const all = known.namespaces.items;
  const items = [...all].sort((one, other) => other.asked_blocks - one.asked_blocks).slice(0, TOP_NAMESPACES);
  show(
    $("namespaces"),
    items.length
      ? table(
          "namespaces",
          [
            ["model"],
            ["id", "whole"],
            ["a block", "number"],
            ["lookups", "number"],
            ["blocks asked", "number"],
            ["hit ratio", "number"],
            ["what to do", "acts"],
          ],
          items.map((one) => {
            const [model, ...more] = nameOf(one);
            const id = one.namespace_id;
            return {
              key: id,
              cells: [
                [model, more.length ? second(more.join(" · ")) : null, staying(one)],
                h("code", { title: id }, `${id.slice(0, 12)}…`),
                [`${count(one.spec.block_tokens)} tokens`, second(bytes(one.spec.layers * one.spec.layer_block_bytes))],
                count(one.lookups),
                [count(one.asked_blocks), one.asked_rate ? second(`${one.asked_rate.toFixed(0)} a second`) : null],
                percent(one.hit_ratio),
                [
                  namespaceButton("usage", id, "Where?", `Where the blocks of ${model} lie`),
                  namespaceButton("rule", id, "TTL, pin …", `What stays of ${model}: time to live and pin …`),
                  namespaceButton("evict-namespace", id, "Evict …", `Evict the blocks of ${model} …`),
                  namespaceButton("invalidate", id, "Invalidate …", `Invalidate ${model} …`),
                ],
              ],
            };
          }),
        )
      : quiet("No namespace yet: engines register theirs when they connect."),
    all.length > items.length || known.namespaces.next_cursor
      ? note(
          `${items.length} of ${count(all.length)}${known.namespaces.next_cursor ? " and more" : ""}; /v1/namespaces has them all.`,
        )
      : null,
    stale("namespaces"),
  );
  offerNamespaces(all);
}

const namespaceButton = (what, namespace, text, label) =>
  h("button", { type: "button", "data-do": what, "data-namespace": namespace, "aria-label": label }, text);

/** What its rule says, where it has one. */
function staying({ pinned, ttl_s: time }) {
  return [
    pinned ? h("span", { class: "badge warn" }, "pinned") : null,
    time === null ? null : second(`leaves ${exactSpan(time)} after its last use`),
  ];
}

// ---- faults ----
function watchFaults(now) {
  if (!failed.activity) {
    for (const node of known.activity.items) {
      for (const fault of node.faults) {
        const name = `${node.node_id} ${fault.metric}`;
        const before = seen.get(name);
        if (!before) {
          const fresh = watched.has("faults");
          seen.set(name, {
            node: node.node_id,
            what: fault.what,
            total: fault.total,
            before: fresh ? 0 : fault.total,
            at: fresh ? now : null,
          });
        } else {
          if (fault.total < before.total) before.before = 0; // it was started again
          if (fault.total !== before.total) before.at = now;
          before.total = fault.total;
        }
      }
    }
    watched.set("faults", true);
  }
  if (!failed.nodes)
    for (const node of known.nodes.items)
      watch(
        `node ${node.node_id}`,
        node.node_id,
        node.refused !== null ? "refused" : node.alive ? STATES[node.state] : node.stopped ? "stopped" : "does not report",
        now,
      );
  if (!failed.volumes)
    for (const volume of known.volumes.items)
      watch(
        `volume ${volume.volume_id}`,
        volume.node_id,
        volume.read_only ? `takes no blocks: ${volume.read_only}` : "takes blocks",
        now,
      );
}

function watch(name, node, state, now) {
  const before = watched.get(name);
  if (before !== undefined && before !== state) happened.add({ at: now, node, what: `${name}: ${state} (was: ${before})` });
  watched.set(name, state);
}

function showFaults() {
  if (!known.activity) return notYet("faults", "activity");
  const entries = [
    ...happened.values.map((one) => ({ ...one, key: `${one.at} ${one.what}`, now: "", total: "" })),
    ...[...seen].map(([key, one]) => ({
      key,
      at: one.at,
      node: one.node,
      what: one.what,
      now: one.at ? `+${count(one.total - one.before)}` : "0",
      total: count(one.total),
      size: one.total,
    })),
  ].sort((one, other) => (other.at ?? 0) - (one.at ?? 0) || (other.size ?? 0) - (one.size ?? 0));
  show(
    $("faults"),
    entries.length
      ? table(
          "recent faults",
          [["last seen"], ["node"], ["what", "wide"], ["since opened", "number"], ["in all", "number"]],
          entries.slice(0, TOP_FAULTS).map((one) => ({
            key: one.key,
            cells: [
              one.at ? clock(new Date(one.at)) : h("span", { class: "quiet" }, "before"),
              one.node,
              one.what,
              one.now,
              one.total,
            ],
          })),
        )
      : quiet("None: no node has counted one since it was started."),
    entries.length > TOP_FAULTS ? note(`${TOP_FAULTS} of ${entries.length}; each node’s /metrics has them all.`) : null,
    stale("activity"),
  );
}
