// Tenants: what they hold, and what they may.

const TIERS = { dram: "DRAM", nvme: "volumes" };
const tenantName = (tenant) => tenant || "(default)";
const quotaPath = (tenant) => `/v1/tenants/quota?tenant=${part(tenant)}`;
const bound = (most) => (most === null ? "as there is room" : `${bytes(most)} at most`);
const hasQuota = (quota) => quota.dram_bytes !== null || quota.nvme_bytes !== null;

function showTenants() {
  if (!known.tenants) return notYet("tenants", "tenants");
  const items = known.tenants.items;
  show(
    $("tenants"),
    items.length
      ? table(
          "tenants",
          [["tenant", "wide"], ["in DRAM"], ["on volumes"], ["nodes", "number"], ["what to do", "acts"]],
          items.map((one) => ({
            key: one.tenant,
            cells: [
              tenantName(one.tenant),
              holding(one, "dram"),
              holding(one, "nvme"),
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
      : quiet("Nobody holds anything, and nobody has a quota."),
    known.tenants.next_cursor ? note(`The first ${items.length} by name; /v1/tenants has them all.`) : null,
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

const quotaWords = (quota) => `Now: in DRAM ${bound(quota.dram_bytes)}, on volumes ${bound(quota.nvme_bytes)}.`;

/** Fields of a quota, and what it is to be by them. */
function quotaFields(tenant) {
  const inputs = Object.keys(TIERS).map((tier) => {
    const most = tenant?.[tier].quota_bytes ?? null;
    return h("input", { id: `dialog-${tier}`, autocomplete: "off", value: most === null ? "" : exactBytes(most) });
  });
  const read = ({ value }) => (value.trim() ? parseBytes(value) : null);
  return {
    shown: [
      field("In DRAM, all nodes together (64 GiB; empty: as there is room)", inputs[0]),
      field("On volumes, all nodes together (1 TiB; empty: as there is room)", inputs[1]),
      list(
        "Beyond it its own coldest blocks leave at once, but none that is in use; nobody sees an error.",
        "It holds over restarts. A block that lies on two nodes counts twice.",
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
        if (!hasQuota(quota)) throw new Error("this would be no quota: to take it away, use “Remove quota …”");
        await edited.change("PUT", quota);
        return `The quota of ${tenantName(tenant)} is set: nodes hear of it within a second.`;
      },
      edited,
    );
  },
  "unset-quota"({ tenant }) {
    const now = nowLine();
    const edited = new Edited(quotaPath(tenant), (quota) => show(now, quotaWords(quota)));
    openEdit(
      `Remove the quota of ${tenantName(tenant)}?`,
      [now, list("It may hold as much as there is room for, as all without a quota.", "Nothing leaves by that.")],
      "Remove",
      async () => {
        await edited.change("DELETE");
        return `${tenantName(tenant)} has no quota any more.`;
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
      [field("The tenant, as in the spec of its namespaces (empty: the default one)", name), now, ...shown],
      "Set",
      async () => {
        const quota = wanted();
        if (!hasQuota(quota)) throw new Error("give a bound");
        const path = quotaPath(name.value);
        if (edited?.path !== path) {
          edited = new Edited(path, (told) => show(now, quotaWords(told)));
          await edited.look();
          if (hasQuota(edited.now))
            throw new Error("it has a quota already, as is said above; confirm once more to replace that");
        }
        await edited.change("PUT", quota);
        return `The quota of ${tenantName(name.value)} is set: nodes hear of it within a second.`;
      },
    );
  },
});
