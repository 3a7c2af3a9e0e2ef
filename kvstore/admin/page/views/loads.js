// Slow loads with the cause of their duration and an action, and load decisions.

const FAST_S = 0.02;
const SLOW_ROWS = 10;
const CAUSES = {
  dram_wait_s: ["waiting for DRAM or the block table", "DRAM is short: raise node.dram, or look for leases that are not released."],
  nvme_wait_s: ["reading from this node's volumes", "The drives limit: add DRAM (node.dram) or volumes, or use the path policy split."],
  peer_wait_s: ["reading from other nodes", "The network limits: check its links and node.compute_cap, and the load of those nodes."],
  none_wait_s: ["waiting for blocks that were not loaded", "See the missing blocks: a volume or node did not deliver them in time."],
  engine_s: ["delivering to the engine", "The engine reads slowly: check the CPU of its host."],
  other_s: ["outside of tiers, nodes and the engine", "The process may have waited for CPU: check the load of the host."],
};

/** Cause of a load's duration, and what to do: [sentence, action or null]. */
function causeOf(load) {
  const parts = Object.keys(CAUSES).map((name) => [load.figures[name] ?? 0, name]);
  const [longest_s, name] = parts.reduce((one, other) => (other[0] > one[0] ? other : one));
  const [words, action] = CAUSES[name];
  const missing = load.blocks - load.hit_blocks;
  const missed = missing > 0 ? `${many(missing, "block is a miss", "blocks are misses")}. ` : "";
  if (load.seconds < FAST_S) return [`${missed}Fast: no cause to look for.`, null];
  if (!longest_s || /did not answer/.test(load.reason)) return [`${missed}${load.reason}`, name === "none_wait_s" ? action : null];
  return [`${missed}${percent(Math.min(1, longest_s / load.seconds))} of the time ${words}.`, action];
}

function showSlow() {
  if (!known.slow) return notYet("slow", "slow");
  const items = known.slow.items.filter((load) => shownNode === null || load.node_id === shownNode).slice(0, SLOW_ROWS);
  const missed = known.slow.unreached.filter((one) => one.kind !== "unsupported");
  show(
    $("slow"),
    items.length
      ? table(
          "the slowest loads of the last minute",
          [["duration", "number"], ["ended", "number"], ["node"], ["blocks", "number"], ["cause and action", "wide"], ["request"]],
          items.map((load, at) => {
            const [words, action] = causeOf(load);
            return {
              key: `${load.node_id} ${load.request_id} ${at}`,
              cells: [
                h("b", {}, seconds(load.seconds)),
                ago(load.ago_s),
                load.node_id,
                `${count(load.hit_blocks)} of ${count(load.blocks)}`,
                [words, action ? second(action) : null],
                h("code", {}, load.request_id || "—"),
              ],
            };
          }),
        )
      : quiet(
          known.slow.items.length
            ? "None of the slowest loads of the last minute is of this node."
            : "No loads in the last minute. The slowest ones appear here with their cause while engines load.",
        ),
    missed.length ? note(`No answer from: ${missed.map((one) => one.node_id).join(", ")}.`) : null,
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
                one.parts.map((part_) => `${part_.node_id} ${count(part_.count)} (${part_.side})`).join(", ") || "no node",
                one.attempt ? second(`planned again, attempt ${one.attempt + 1}`) : null,
                one.excluded.length ? second(`excluded: ${one.excluded.join(", ")}`) : null,
              ],
              seconds(one.predicted_s),
            ],
          })),
        )
      : quiet("No load was planned yet. Loads are planned if an engine names a decode node, so that both hosts' storage links are used."),
    stale("decisions"),
  );
}
