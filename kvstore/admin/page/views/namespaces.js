// Namespaces: filter, pages, retention.

const PAGE_ROWS = 20;

/** Show the state of a list that has not been received. */
function notYet(where, list) {
  const error = failed[list];
  show($(where), quiet(!error ? "loading …" : error.status === 401 ? "A token is required." : "Not known yet."));
}

function nameOf(namespace) {
  const { spec } = namespace;
  return [
    spec.model || "(no model)",
    spec.tenant ? `tenant ${spec.tenant}` : "",
    spec.weights_epoch ? `weights ${spec.weights_epoch}` : "",
    spec.shard_count > 1 ? `shard ${spec.shard_rank + 1} of ${spec.shard_count}` : "",
  ].filter(Boolean);
}

const namespacesPage = { at: 0 };

function showNamespaces() {
  if (!known.namespaces) return notYet("namespaces", "namespaces");
  const all = [...known.namespaces.items].sort((one, other) => other.asked_blocks - one.asked_blocks);
  const words = $("namespaces-filter").value.trim().toLowerCase().split(/\s+/);
  const text = (one) => `${nameOf(one).join(" ")} ${one.namespace_id}`.toLowerCase();
  const found = all.filter((one) => words.every((word) => text(one).includes(word)));
  const pages = Math.max(1, Math.ceil(found.length / PAGE_ROWS));
  namespacesPage.at = Math.min(namespacesPage.at, pages - 1);
  const items = found.slice(namespacesPage.at * PAGE_ROWS, (namespacesPage.at + 1) * PAGE_ROWS);
  $("namespaces-filter").closest("p").hidden = all.length <= 5;
  show(
    $("namespaces"),
    items.length
      ? table(
          "namespaces",
          [
            ["model"],
            ["id", "whole"],
            ["block size", "number"],
            ["lookups", "number"],
            ["blocks looked up", "number"],
            ["hit ratio", "number"],
            ["actions", "acts"],
          ],
          items.map(namespaceRow),
        )
      : quiet(
          all.length
            ? "No namespace matches the filter."
            : "No namespaces yet. An engine registers its namespace (model, weights, layout) when it connects.",
        ),
    pages > 1 ? pager(found.length, pages) : null,
    known.namespaces.next_cursor ? note("Only the first 500 namespaces are shown. All: /v1/namespaces.") : null,
    stale("namespaces"),
  );
  offerNamespaces(all);
}

function pager(total, pages) {
  const at = namespacesPage.at;
  const button = (to, label) => h("button", { type: "button", "data-do": "page", "data-to": String(to) }, label);
  return h(
    "p",
    { class: "tools pager" },
    at > 0 ? button(at - 1, "Previous") : null,
    at < pages - 1 ? button(at + 1, "Next") : null,
    h("span", { class: "quiet small" }, `page ${at + 1} of ${pages}, ${count(total)} namespaces`),
  );
}

function namespaceRow(one) {
  const [model, ...more] = nameOf(one);
  const id = one.namespace_id;
  return {
    key: id,
    cells: [
      [model, more.length ? second(more.join(" · ")) : null, retentionWords(one)],
      h("code", { title: id }, `${id.slice(0, 12)}…`),
      [`${count(one.spec.block_tokens)} tokens`, second(bytes(one.spec.layers * one.spec.layer_block_bytes))],
      count(one.lookups),
      [count(one.asked_blocks), one.asked_rate ? second(`${one.asked_rate.toFixed(0)} per second`) : null],
      percent(one.hit_ratio),
      [
        namespaceButton("usage", id, "Usage", `Usage of ${model} by volume`),
        namespaceButton("rule", id, "TTL, keep …", `Retention of ${model}: time to live, keep …`),
        namespaceButton("evict-namespace", id, "Evict …", `Evict the blocks of ${model} …`),
        namespaceButton("invalidate", id, "Invalidate …", `Invalidate ${model} …`),
      ],
    ],
  };
}

const namespaceButton = (what, namespace, text, label) =>
  h("button", { type: "button", "data-do": what, "data-namespace": namespace, "aria-label": label }, text);

/** The retention rule of a namespace in words. */
function retentionWords({ kept, copies, ttl_s: time }) {
  return [
    kept ? h("span", { class: "badge warn" }, "kept") : null,
    copies > 1 ? h("span", { class: "badge" }, `${copies} copies`) : null,
    time === null ? null : second(`evicted ${exactSpan(time)} after its last use`),
  ];
}

Object.assign(ACTS, {
  page({ to }) {
    namespacesPage.at = Number(to);
    showNamespaces();
    ($("namespaces").querySelector("[data-do=page]") ?? $("namespaces-filter")).focus();
  },
});
