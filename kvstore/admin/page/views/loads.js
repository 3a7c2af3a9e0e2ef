// Slow loads with the cause of their duration and an action, load decisions, and reads ahead.

const SLOW_ROWS = 10;

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
          items.map((load, at) => ({
            key: `${load.node_id} ${load.request_id} ${at}`,
            cells: [
              h("b", {}, seconds(load.seconds)),
              ago(load.ago_s),
              load.node_id,
              `${count(load.hit_blocks)} of ${count(load.blocks)}`,
              [load.reason, load.action ? second(load.action) : null],
              h("code", {}, load.request_id || "—"),
            ],
          })),
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
      : quiet("No load was planned yet. Loads are planned if only other hosts' storage holds some of their blocks, and the engine's host runs a node."),
    known.activity ? readAheadLine(known.activity.items) : null,
    note(
      "Verdicts of engines to load or to compute, the seconds that they saved and their errors are metrics of the engines: vllm:kvstore_verdict*, vllm:kvstore_load_prediction*.",
    ),
    stale("decisions"),
  );
}
