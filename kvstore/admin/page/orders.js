// Orders to nodes and to the store as a whole, and what may stay of a namespace.

const POLICIES = {
  split: "each load over both sides’ storage links, by what waits there",
  shorter_queue: "each load over the link with the shorter queue",
  round_robin: "in turn",
  prefill_only: "over the prefill side’s link alone",
};
const TYPED = 8; // digits of a namespace's id that are typed before it is invalidated

const field = (label, input, ...more) => h("label", { class: "field", for: input.id }, h("span", {}, label), input, more);
const nowLine = () => h("p", { role: "status" }, "asking …");

/** Where a word is to be typed, without which the dialog cannot be confirmed; nor before it is ready. */
function typed(word, ready = () => true) {
  const input = h("input", { id: "dialog-typed", autocomplete: "off", spellcheck: "false" });
  const check = () => {
    $("dialog-yes").disabled = !ready() || input.value.trim().toLowerCase() !== word;
  };
  input.addEventListener("input", check);
  return { input, check };
}

function rowOf(namespace) {
  const found = known.namespaces.items.find((one) => one.namespace_id === namespace);
  return { found, name: nameOf(found).join(" · ") };
}

Object.assign(ACTS, {
  rule({ namespace }) {
    const { found, name } = rowOf(namespace);
    const now = nowLine();
    const ttl = h("input", { id: "dialog-ttl", autocomplete: "off", value: found.ttl_s === null ? "" : exactSpan(found.ttl_s) });
    const pin = h("input", { type: "checkbox", id: "dialog-pin", checked: found.pinned });
    const edited = new Edited(`/v1/namespaces/${namespace}/rule`, (rule) => {
      const time = rule.ttl_s === null ? "leave as room is needed" : `leave ${exactSpan(rule.ttl_s)} after their last use`;
      show(now, `Now: ${rule.pinned ? "pinned; " : ""}its blocks ${time}.`);
    });
    openEdit(
      `What stays of ${name}?`,
      [
        h("p", { class: "quiet" }, h("code", {}, namespace)),
        now,
        field("Time to live: blocks leave when nobody used them for so long (7 d, 36 h, 30 min; empty: never for that)", ttl),
        h(
          "label",
          { for: "dialog-pin" },
          pin,
          h("span", {}, "Pinned: its blocks are not evicted, up to half of each tier of a node."),
        ),
        list(
          "It holds at every node, over restarts too.",
          "With a time to live, what is older leaves for good. A pin outlasts it.",
        ),
      ],
      "Set",
      async () => {
        const text = ttl.value.trim();
        await edited.change("PUT", { ttl_s: text ? parseSpan(text) : null, pinned: pin.checked });
        return `Set for ${name}: nodes hear of it within a second.`;
      },
      edited,
    );
  },
  invalidate({ namespace }) {
    const { found, name } = rowOf(namespace);
    const word = namespace.slice(0, TYPED);
    const { input, check } = typed(word);
    openDialog(
      `Invalidate ${name}?`,
      [
        h("p", { class: "quiet" }, h("code", {}, namespace)),
        h(
          "p",
          {},
          "For blocks that are wrong: every block of it goes, from all tiers of all nodes, durable or not",
          found.pinned ? ", and though it is pinned." : ".",
        ),
        list(
          "Stop the engines that made them first, or they store them again.",
          "Nodes that do not answer keep what they have, and serve it: it is to be done again once they are back.",
          "It cannot be undone.",
        ),
        field(["To confirm, type the first digits of its id: ", h("code", {}, word)], input),
      ],
      "Invalidate",
      async () => {
        const done = await post(`/v1/namespaces/${namespace}/invalidate`);
        const gone = `${many(done.evicted_blocks, "block is", "blocks are")} gone`;
        if (done.complete) return `${gone}: nothing of ${name} is left.`;
        const away = done.unreached.map((one) => `${one.node_id} (${one.detail})`).join(", ");
        throw new Partly(
          `Done in part: ${gone}${done.kept_blocks ? `, ${count(done.kept_blocks)} in use stay` : ""}${away ? `; not reached: ${away}` : ""}. Do it again once that is over`,
        );
      },
    );
    check();
  },
  "traffic-cap"({ node }) {
    const now = nowLine();
    const cap = h("input", { id: "dialog-cap", autocomplete: "off", required: true });
    const edited = new Edited(`/v1/nodes/${part(node)}/traffic-cap`, ({ bytes_per_s: most }) =>
      show(now, most ? `Now: ${rate(most)} at most.` : "Now: no cap."),
    );
    openEdit(
      `Traffic cap of node ${node}`,
      [
        now,
        field("The most KV traffic a second over the compute network, each direction (500 MB, 2.8 GB; 0: no cap)", cap),
        list(
          "At once, for connections that are there too.",
          "Until the node is started again: set node.compute_cap where it is to last.",
        ),
      ],
      "Set",
      async () => {
        const done = await edited.change("PUT", { bytes_per_s: parseBytes(cap.value) });
        return `KV traffic of node ${node}: ${done.bytes_per_s ? `${rate(done.bytes_per_s)} at most` : "no cap"}.`;
      },
      edited,
      ({ bytes_per_s: most }) => {
        if (!cap.value) cap.value = most % 1e6 ? `${most} B` : `${most / 1e6} MB`;
      },
    );
  },
  compare({ node }) {
    openDialog(
      `Check the index of node ${node} now?`,
      [
        list(
          "What the index says of this node is compared with what it holds, and mended where it differs. No block is lost.",
          "Nodes do so by themselves from time to time. With many blocks it takes a while.",
        ),
      ],
      "Check",
      async () => {
        const done = await post(`/v1/nodes/${part(node)}/anti-entropy`);
        const ranges = done.repaired_ranges;
        return ranges
          ? `The index differed from node ${node} in ${many(ranges, "range of keys", "ranges of keys")}: mended.`
          : `The index says what node ${node} holds.`;
      },
      "main",
    );
  },
  "path-policy"() {
    const now = nowLine();
    const choice = h(
      "select",
      { id: "dialog-policy" },
      Object.keys(POLICIES).map((name) => h("option", { value: name }, name.replaceAll("_", " "))),
    );
    const about = h("p", { class: "quiet" });
    const explain = () => show(about, `${choice.value.replaceAll("_", " ")}: ${POLICIES[choice.value]}.`);
    choice.value = known.cluster.path_policy;
    choice.addEventListener("change", explain);
    const edited = new Edited("/v1/path-policy", ({ policy, configured }) =>
      show(
        now,
        `Now: ${policy.replaceAll("_", " ")}${policy === configured ? "" : `; configured: ${configured.replaceAll("_", " ")}`}.`,
      ),
    );
    explain();
    openEdit(
      "Path policy",
      [
        now,
        field("Over whose storage links loads are read, where a request names no policy", choice),
        about,
        list(
          "For loads planned from now on.",
          "Until the metadata server is started again: set metadata.path_policy where it is to last.",
        ),
      ],
      "Set",
      async () => {
        const done = await edited.change("PUT", { policy: choice.value });
        return `Path policy: ${done.policy.replaceAll("_", " ")}.`;
      },
      edited,
      null,
      "main",
    );
  },
  rebuild() {
    const now = nowLine();
    const { input, check } = typed("rebuild", () => edited.tag);
    const edited = new Edited("/v1/index", (index) =>
      show(now, `Now: ${many(index.blocks, "block", "blocks")}, ${bytes(index.bytes)}.`),
    );
    openEdit(
      "Rebuild the index?",
      [
        now,
        list(
          "The index is dropped, and made anew from what the nodes hold. No block is lost.",
          "The metadata server is away for a moment; until all nodes have told what they hold, lookups find less than there is.",
        ),
        field(["To confirm, type ", h("code", {}, "rebuild")], input),
      ],
      "Rebuild",
      async () => {
        await ask("POST", "/v1/index/rebuild", undefined, edited.tag);
        return "The index is made anew: the number of its blocks grows as the nodes tell theirs.";
      },
      edited,
      check,
    );
  },
});
