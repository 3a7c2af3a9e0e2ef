// Tenants: usage and quotas.

const TIERS = { dram: "DRAM", nvme: "volumes" };
const tenantName = (tenant) => tenant || "(default)";
const quotaPath = (tenant) => `/v1/tenants/quota?tenant=${part(tenant)}`;
const bound = (most) => (most === null ? "no limit" : `${bytes(most)} at most`);
const hasQuota = (quota) => quota.dram_bytes !== null || quota.nvme_bytes !== null;

function showTenants() {
  if (!known.tenants) return notYet("tenants", "tenants");
  const items = known.tenants.items;
  show(
    $("tenants"),
    items.length
      ? table(
          "tenants",
          [["tenant", "wide"], ["in DRAM"], ["on volumes"], ["protected by hints"], ["nodes", "number"], ["actions", "acts"]],
          items.map((one) => ({
            key: one.tenant,
            cells: [
              tenantName(one.tenant),
              holding(one, "dram"),
              holding(one, "nvme"),
              hinted(one.tenant),
              count(one.nodes),
              [
                tenantButton("quota", one.tenant, "Quota …", `Quota of ${tenantName(one.tenant)} …`),
                one.dram.quota_bytes === null && one.nvme.quota_bytes === null
                  ? null
                  : tenantButton("unset-quota", one.tenant, "Remove quota …", `Remove the quota of ${tenantName(one.tenant)} …`),
              ],
            ],
          })),
        )
      : quiet("No tenant has blocks or a quota. Engines name their tenant in the spec of their namespace; usage appears when they store."),
    known.tenants.next_cursor ? note(`The first ${items.length} by name. All: /v1/tenants.`) : null,
    stale("tenants"),
  );
  $("quotas").hidden = false;
}

const tenantButton = (what, tenant, text, label) =>
  h("button", { type: "button", "data-do": what, "data-tenant": tenant, "aria-label": label }, text);

function holding(tenant, tier) {
  const { held_bytes: now, quota_bytes: most } = tenant[tier];
  if (most === null) return [bytes(now), second("no quota")];
  const said = `${bytes(now)} of ${bytes(most)}`;
  const share = most ? now / most : now ? 1 : 0;
  return h(
    "span",
    { class: "held" },
    h("span", { class: now > most ? "bad" : null }, said),
    bar(share, `${tenantName(tenant.tenant)} holds ${said} in ${TIERS[tier]}`, now > most),
  );
}

/** What hints of a tenant protect at the nodes shown. */
function hinted(tenant) {
  const mine = (known.activity?.items ?? []).flatMap(({ hints }) => hints.filter((one) => one.tenant === tenant));
  const sum = (name) => mine.reduce((total, one) => total + one[name], 0);
  if (!mine.length) return h("span", { class: "quiet" }, "no hints");
  return [bytes(sum("protected_bytes")), second(`${many(sum("sessions"), "session", "sessions")}, ${count(sum("dropped_blocks"))} blocks dropped`)];
}

const quotaWords = (quota) => `Now: in DRAM ${bound(quota.dram_bytes)}, on volumes ${bound(quota.nvme_bytes)}.`;

/** Input fields of a quota, and the function that reads them. */
function quotaFields(tenant) {
  const inputs = Object.keys(TIERS).map((tier) => {
    const most = tenant?.[tier].quota_bytes ?? null;
    return h("input", { id: `dialog-${tier}`, autocomplete: "off", value: most === null ? "" : exactBytes(most) });
  });
  const read = ({ value }) => (value.trim() ? parseBytes(value) : null);
  return {
    shown: [
      field("In DRAM of all nodes, for example 64 GiB; empty: no limit", inputs[0]),
      field("On volumes of all nodes, for example 1 TiB; empty: no limit", inputs[1]),
      list(
        "Above the quota, the tenant's coldest blocks that are not in use are evicted at once. Engines see no error.",
        "A quota survives restarts. A block on two nodes counts twice.",
      ),
    ],
    wanted: () => ({ dram_bytes: read(inputs[0]), nvme_bytes: read(inputs[1]) }),
  };
}

Object.assign(ACTS, {
  quota({ tenant }) {
    const found = known.tenants.items.find((one) => one.tenant === tenant);
    const now = nowLine();
    const { shown, wanted } = quotaFields(found);
    const edited = new Edited(quotaPath(tenant), (quota) => show(now, quotaWords(quota)));
    openEdit(
      `Quota of ${tenantName(tenant)}`,
      [
        h("p", {}, `It holds ${bytes(found.dram.held_bytes)} in DRAM and ${bytes(found.nvme.held_bytes)} on volumes.`),
        now,
        ...shown,
      ],
      "Set",
      async () => {
        const quota = wanted();
        if (!hasQuota(quota)) throw new Error("enter at least one limit. To remove the quota, use “Remove quota …”");
        await edited.change("PUT", quota);
        return `The quota of ${tenantName(tenant)} is set. Nodes apply it within a second.`;
      },
      edited,
    );
  },
  "unset-quota"({ tenant }) {
    const now = nowLine();
    const edited = new Edited(quotaPath(tenant), (quota) => show(now, quotaWords(quota)));
    openEdit(
      `Remove the quota of ${tenantName(tenant)}?`,
      [now, list("The tenant may then use all free space, like tenants without a quota.", "No block is evicted.")],
      "Remove",
      async () => {
        await edited.change("DELETE");
        return `${tenantName(tenant)} has no quota now.`;
      },
      edited,
      null,
      "main",
    );
  },
  "new-quota"() {
    const name = h("input", { id: "dialog-tenant", autocomplete: "off", spellcheck: "false" });
    const now = h("div", { role: "status" });
    const { shown, wanted } = quotaFields(null);
    let edited = null;
    openDialog(
      "Quota for another tenant",
      [field("Tenant, as in the spec of its namespaces (empty: the default tenant)", name), now, ...shown],
      "Set",
      async () => {
        const quota = wanted();
        if (!hasQuota(quota)) throw new Error("enter at least one limit");
        const path = quotaPath(name.value);
        if (edited?.path !== path) {
          edited = new Edited(path, (told) => show(now, quotaWords(told)));
          await edited.look();
          if (hasQuota(edited.now))
            throw new Error("it has a quota already, which is shown above; confirm again to replace it");
        }
        await edited.change("PUT", quota);
        return `The quota of ${tenantName(name.value)} is set. Nodes apply it within a second.`;
      },
    );
  },
});
