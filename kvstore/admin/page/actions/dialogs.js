// Changes, each confirmed in a dialog that lists the consequences; and the token.

let opener = null; // element that opened the dialog; it may have been replaced since
let perform = null;
let asking = 0; // number of the open dialog, so that responses for a closed one are dropped

/** A partial success, shown in the dialog. */
class Partly extends Error {}

/** Open the dialog. act: called on confirmation; its result is announced, and its error is shown in the dialog. */
function openDialog(title, body, yes, act, tone = "danger") {
  opener = document.activeElement;
  perform = act;
  asking += 1;
  show($("dialog-title"), title);
  $("dialog-body").replaceChildren(...body.filter(Boolean));
  show($("dialog-error"), "");
  const button = $("dialog-yes");
  show(button, yes);
  button.className = tone;
  button.hidden = act === null;
  button.disabled = false;
  show($("dialog-no"), act === null ? "Close" : "Cancel");
  $("dialog").showModal();
  ($("dialog-body").querySelector("input, select") ?? $("dialog-no")).focus();
  return asking;
}

/** Open a dialog that can be confirmed after `edited` was read. fill: called with its state if the dialog is still open. */
async function openEdit(title, body, yes, act, edited, fill, tone = "danger") {
  const mine = openDialog(title, body, yes, act, tone);
  $("dialog-yes").disabled = true;
  try {
    await edited.look();
    if (mine !== asking) return;
    $("dialog-yes").disabled = false;
    fill?.(edited.now);
  } catch (error) {
    if (mine === asking) complain(error);
  }
}

/** Show an error in the dialog. */
function complain(error) {
  const refused = error instanceof Refusal && error.status === 403;
  const text = error.message.replace(/\.$/, "");
  show($("dialog-error"), error instanceof Partly ? `${text}.` : `${refused ? "Refused" : "Not done"}: ${text}.`);
}

async function confirmed(event) {
  event.preventDefault();
  const button = $("dialog-yes");
  if (perform === null || button.disabled) return;
  const mine = asking;
  const label = button.textContent;
  button.disabled = true;
  show(button, "working …");
  show($("dialog-error"), "");
  let said = null;
  try {
    said = await perform();
  } catch (error) {
    if (mine === asking && $("dialog").open) {
      complain(error);
      button.disabled = false;
      show(button, label);
    } else tell(`${label}: ${error instanceof Partly ? "" : "not done: "}${error.message}.`);
    if (error instanceof Partly) again();
    return;
  }
  if (mine === asking && $("dialog").open) $("dialog").close();
  if (said) tell(said);
  again();
}

function closed() {
  if ($("dialog").open) return; // the event comes one frame late: another dialog is open
  perform = null;
  asking += 1;
  $("dialog-body").replaceChildren(); // no token stays in the page
  if (opener?.isConnected) return opener.focus();
  const { do: what, node, volume, namespace, tenant } = opener?.dataset ?? {};
  const twins = [...document.querySelectorAll("[data-do]")].filter(
    ({ dataset: one }) =>
      one.node === node && one.volume === volume && one.namespace === namespace && one.tenant === tenant && what,
  );
  const near = node || volume || tenant !== undefined ? twins[0] : undefined; // another button of the same subject
  (twins.find((one) => one.dataset.do === what) ?? near ?? $("health")).focus();
}

/** Keep the focus in the dialog: after its last control comes its first. */
function trap(event) {
  if (event.key !== "Tab") return;
  const stops = [...$("dialog").querySelectorAll("button, input, select, textarea")].filter(
    (one) => !one.disabled && !one.hidden,
  );
  const last = stops[stops.length - 1];
  if (event.shiftKey && document.activeElement === stops[0]) {
    event.preventDefault();
    last.focus();
  } else if (!event.shiftKey && document.activeElement === last) {
    event.preventDefault();
    stops[0].focus();
  }
}

let silence = 0;
function tell(text) {
  show($("told"), text);
  clearTimeout(silence);
  silence = setTimeout(() => show($("told")), 8000);
}

const list = (...items) =>
  h(
    "ul",
    {},
    items.filter(Boolean).map((text) => h("li", {}, text)),
  );

function evicted(done, from) {
  return `${many(done.evicted_blocks, "block", "blocks")} evicted${from}, ${count(done.kept_blocks)} kept because they are in use`;
}

// ---- changes ----
const ACTS = {
  drain({ node }) {
    const move = h("input", { type: "checkbox", id: "dialog-move" });
    openDialog(
      `Drain node ${node}?`,
      [
        list(
          "The node accepts no new blocks, so engines of its host store nothing. Their loads continue.",
          "All its blocks become durable. Then it may be stopped, and has its blocks again after a start.",
          "The drain survives restarts until it is cancelled. No block is deleted.",
        ),
        h(
          "label",
          { for: "dialog-move" },
          move,
          h("span", {}, "Move: copy blocks that exist only here to other nodes. For a node that is removed permanently."),
        ),
      ],
      "Drain",
      async () => {
        await post(`/v1/nodes/${part(node)}/drain`, { move: move.checked });
        return `Node ${node} is draining${move.checked ? ", and its blocks are moved" : ""}. Its view shows the progress.`;
      },
    );
  },
  undrain({ node }) {
    openDialog(
      `Undrain node ${node}?`,
      [list("The node accepts new blocks again.", "Blocks that were copied to other nodes stay there, too.")],
      "Undrain",
      async () => {
        await post(`/v1/nodes/${part(node)}/undrain`);
        return `Node ${node} accepts new blocks again.`;
      },
      "main",
    );
  },
  "evict-volume"({ volume }) {
    const found = known.volumes.items.find((one) => one.volume_id === volume);
    const share = found && found.capacity_bytes ? Math.round((found.used_bytes / found.capacity_bytes) * 100) : 0;
    const to = h("input", {
      type: "number",
      id: "dialog-percent",
      min: 0,
      max: 100,
      step: 1,
      required: true,
      value: Math.floor(share / 2),
    });
    openDialog(
      `Evict from ${volume}?`,
      [
        h("p", {}, `It is ${share} % full: ${many(found?.blocks ?? 0, "block", "blocks")}.`),
        h("label", { for: "dialog-percent" }, "Evict the coldest blocks until it is", to, "% full."),
        list(
          "Blocks without another replica are lost; engines compute them again.",
          "Blocks in use stay. In DRAM, blocks that are not durable yet stay, too.",
        ),
      ],
      "Evict",
      async () => {
        const name = volume.slice(found.node_id.length + 1);
        const done = await post(`/v1/volumes/${part(found.node_id)}/${part(name)}/evict`, { to_percent: Number(to.value) });
        return `${evicted(done, ` from ${volume}`)}; ${bytes(done.used_bytes)} are used.`;
      },
    );
  },
  "evict-namespace"({ namespace }) {
    const found = known.namespaces.items.find((one) => one.namespace_id === namespace);
    const name = nameOf(found).join(" · ");
    if (found.kept)
      return openDialog(
        `${name} is kept`,
        [
          list(
            "A kept namespace is not evicted. Clear “Kept” in its retention rule first.",
            "If the content of its blocks is wrong, invalidate it: this drops them, kept or not.",
          ),
        ],
        "",
        null,
      );
    const where = h("div", {}, quiet("counting blocks …"));
    const tiers = ["dram", "nvme"].map((tier) =>
      h("input", { type: "checkbox", id: `dialog-${tier}`, checked: true, value: tier }),
    );
    const mine = openDialog(
      `Evict the blocks of ${name}?`,
      [
        h("p", { class: "quiet" }, h("code", {}, namespace)),
        where,
        h("label", { for: "dialog-dram" }, tiers[0], "from DRAM of all nodes"),
        h("label", { for: "dialog-nvme" }, tiers[1], "from volumes of all nodes"),
        list(
          "Blocks without another replica are lost; engines compute them again.",
          "Blocks in use stay, and blocks in DRAM that are not durable yet. Engines may store evicted blocks again at once.",
        ),
      ],
      "Evict",
      async () => {
        const chosen = tiers.filter((one) => one.checked).map((one) => one.value);
        if (!chosen.length) throw new Error("choose DRAM, volumes or both");
        const done = await post(`/v1/namespaces/${namespace}/evict`, { tiers: chosen });
        const left = done.unreached.filter((one) => one.kind !== "unsupported").map((one) => one.node_id);
        return `${evicted(done, "")}${left.length ? `; not reached: ${left.join(", ")}` : ""}.`;
      },
    );
    fillUsage(namespace, where, mine);
  },
  usage({ namespace }) {
    const name = nameOf(known.namespaces.items.find((one) => one.namespace_id === namespace)).join(" · ");
    const where = h("div", {}, quiet("counting blocks …"));
    fillUsage(
      namespace,
      where,
      openDialog(`Usage of ${name}`, [h("p", { class: "quiet" }, h("code", {}, namespace)), where], "", null),
    );
  },
  token() {
    const box = h("input", { type: "password", id: "dialog-token", autocomplete: "off", required: true, "aria-label": "Token" });
    openDialog(
      "A token is required",
      [
        h("p", {}, "Ask an operator of this store for a token. The role read permits queries; the role operator also permits changes."),
        h("label", { for: "dialog-token" }, "Token", box),
        h("p", { class: "note" }, "The token is kept until this tab is closed, and is sent to this server only."),
      ],
      "Continue",
      async () => {
        const before = sessionStorage.getItem(TOKEN);
        sessionStorage.setItem(TOKEN, box.value.trim());
        try {
          await get("/v1/cluster");
        } catch (error) {
          if (error.status === 401) {
            if (before === null) sessionStorage.removeItem(TOKEN);
            else sessionStorage.setItem(TOKEN, before);
            throw error;
          }
        }
        return null;
      },
      "main",
    );
  },
};

async function fillUsage(namespace, where, mine) {
  try {
    const found = await get(`/v1/namespaces/${namespace}/usage`);
    if (mine !== asking) return;
    show(
      where,
      found.volumes.length
        ? table(
            "by volume",
            [["volume"], ["tier"], ["blocks", "number"], ["payload", "number"]],
            found.volumes.map((one) => ({
              key: one.volume_id,
              cells: [one.volume_id, one.tier, count(one.blocks), bytes(one.bytes)],
            })),
          )
        : h("p", {}, "No node that answers has blocks of this namespace."),
      found.unreached
        .filter((one) => one.kind !== "unsupported")
        .map((one) => note(`${one.node_id} is not included: ${one.detail}`)),
    );
  } catch (error) {
    show(where, h("p", { class: "bad" }, `Not counted: ${error.message}.`));
  }
}
