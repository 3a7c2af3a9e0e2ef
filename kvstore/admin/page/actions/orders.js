// Changes of nodes, of the whole store, and of the retention of namespaces.

const POLICIES = {
  split: "each load over both hosts’ storage links, by their queues",
  shorter_queue: "each load over the link with the shorter queue",
  round_robin: "over the hosts’ links in turn",
  prefill_only: "over the prefill host’s link only",
};
const TYPED = 8; // digits of a namespace's id to type before it is invalidated

const field = (label, input, ...more) => h("label", { class: "field", for: input.id }, h("span", {}, label), input, more);
const nowLine = () => h("p", { role: "status" }, "loading …");

/** Input for a word that must be typed before the dialog can be confirmed. ready: whether it can be confirmed otherwise. */
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
    const keep = h("input", { type: "checkbox", id: "dialog-keep", checked: found.kept });
    const twice = h("input", { type: "checkbox", id: "dialog-twice", checked: found.copies > 1 });
    const edited = new Edited(`/v1/namespaces/${namespace}/rule`, (rule) => {
      const time = rule.ttl_s === null ? "are evicted when space is needed" : `are evicted ${exactSpan(rule.ttl_s)} after their last use`;
      show(now, `Now: ${rule.kept ? "kept; " : ""}${rule.copies > 1 ? "two copies; " : ""}its blocks ${time}.`);
    });
    openEdit(
      `Retention of ${name}`,
      [
        h("p", { class: "quiet" }, h("code", {}, namespace)),
        now,
        field("Time to live: blocks are evicted this long after their last use (7 d, 36 h, 30 min; empty: no time to live)", ttl),
        h(
          "label",
          { for: "dialog-keep" },
          keep,
          h("span", {}, "Kept: blocks are protected from eviction, up to half of each tier of a node."),
        ),
        h(
          "label",
          { for: "dialog-twice" },
          twice,
          h("span", {}, "Two copies: each durable block is copied to a second node, and survives the loss of one."),
        ),
        list(
          "The rule applies on every node and survives restarts.",
          "A time to live evicts older blocks permanently. A kept namespace does not lose them.",
        ),
      ],
      "Set",
      async () => {
        const text = ttl.value.trim();
        await edited.change("PUT", { ttl_s: text ? parseSpan(text) : null, kept: keep.checked, copies: twice.checked ? 2 : 1 });
        return `Retention of ${name} is set. Nodes apply it within a second.`;
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
          "For blocks with wrong content. All its blocks are dropped from all tiers of all nodes, durable or not",
          found.kept ? ", although it is kept." : ".",
        ),
        list(
          "Stop the engines that stored them first, or they will store them again.",
          "Nodes that do not answer keep their blocks and serve them. Invalidate again when they are back.",
          "This cannot be undone.",
        ),
        field(["To confirm, type the first digits of its id: ", h("code", {}, word)], input),
      ],
      "Invalidate",
      async () => {
        const done = await post(`/v1/namespaces/${namespace}/invalidate`);
        const gone = `${many(done.evicted_blocks, "block was", "blocks were")} dropped`;
        if (done.complete) return `${gone}. ${name} has no blocks now.`;
        const away = done.unreached.map((one) => `${one.node_id} (${one.detail})`).join(", ");
        throw new Partly(
          `Partly done: ${gone}${done.kept_blocks ? `, ${count(done.kept_blocks)} in use were kept` : ""}${away ? `; not reached: ${away}` : ""}. Repeat it when all nodes answer`,
        );
      },
    );
    check();
  },
  "traffic-cap"({ node }) {
    const now = nowLine();
    const cap = h("input", { id: "dialog-cap", autocomplete: "off", required: true });
    const edited = new Edited(`/v1/nodes/${part(node)}/traffic-cap`, ({ bytes_per_s: most }) =>
      show(now, most ? `Now: at most ${rate(most)}.` : "Now: no cap."),
    );
    openEdit(
      `Traffic cap of node ${node}`,
      [
        now,
        field("Maximum KV traffic per second and direction over the compute network (500 MB, 2.8 GB; 0: no cap)", cap),
        list(
          "Applies at once, also to open connections.",
          "Lasts until the node restarts. For a permanent cap, set node.compute_cap.",
        ),
      ],
      "Set",
      async () => {
        const done = await edited.change("PUT", { bytes_per_s: parseBytes(cap.value) });
        return `KV traffic of node ${node}: ${done.bytes_per_s ? `at most ${rate(done.bytes_per_s)}` : "no cap"}.`;
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
          "The index is compared with the blocks of this node, and differences are repaired. No block is lost.",
          "Nodes also do this periodically. With many blocks it may last minutes.",
        ),
      ],
      "Check",
      async () => {
        const done = await post(`/v1/nodes/${part(node)}/anti-entropy`);
        const ranges = done.repaired_ranges;
        return ranges
          ? `The index differed from node ${node} in ${many(ranges, "key range", "key ranges")} and was repaired.`
          : `The index agrees with node ${node}.`;
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
        field("Choice of storage links for loads whose request names no policy", choice),
        about,
        list(
          "Applies to loads planned from now on.",
          "Holds over restarts, instead of metadata.path_policy, until that policy is chosen again.",
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
          "The index is dropped and created again from the inventories of the nodes. No block is lost.",
          "The metadata server restarts. Until all nodes have sent their inventories, lookups find fewer blocks.",
        ),
        field(["To confirm, type ", h("code", {}, "rebuild")], input),
      ],
      "Rebuild",
      async () => {
        await ask("POST", "/v1/index/rebuild", undefined, edited.tag);
        return "The index is being rebuilt: its number of blocks grows as nodes send their inventories.";
      },
      edited,
      check,
    );
  },
});
