// Changes, each confirmed by a dialog that says what will happen; and the token.

let opener = null; // {selector} of what opened the dialog: it may have been drawn anew meanwhile
let perform = null;
let asking = 0; // names the dialog that is open, so that answers for one that was closed are dropped

/** What was done in part: it stays in the dialog. */
class Partly extends Error {}

/** Opens the dialog. act: called when it is confirmed; what it returns is told, and what it throws is shown in the dialog. */
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

/** As openDialog, for what can be confirmed once `edited` was looked at; fill: with what it is, where the dialog is still open. */
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

/** Says in the dialog what went wrong. */
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
  if ($("dialog").open) return; // word of it comes a frame later: another is open by now
  perform = null;
  asking += 1;
  $("dialog-body").replaceChildren(); // a token does not stay in the page
  if (opener?.isConnected) return opener.focus();
  const { do: what, node, volume, namespace, tenant } = opener?.dataset ?? {};
  const twins = [...document.querySelectorAll("[data-do]")].filter(
    ({ dataset: one }) =>
      one.node === node && one.volume === volume && one.namespace === namespace && one.tenant === tenant && what,
  );
  const near = node || volume || tenant !== undefined ? twins[0] : undefined; // of another button of the same place
  (twins.find((one) => one.dataset.do === what) ?? near ?? $("health")).focus();
}

/** Keeps the focus in the dialog: behind its last control comes its first. */
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
  return `${many(done.evicted_blocks, "block has", "blocks have")} left${from}, ${count(done.kept_blocks)} stay though meant`;
}

// ---- what can be done ----
const ACTS = {
  drain({ node }) {
    const move = h("input", { type: "checkbox", id: "dialog-move" });
    openDialog(
      `Drain node ${node}?`,
      [
        list(
          "It takes no new blocks, and engines of its host store nothing; what they load they still get.",
          "Everything that it holds becomes durable. Then it may be stopped, and finds its blocks again when it is back.",
          "This holds over restarts, until it is undrained. Nothing is deleted.",
        ),
        h(
          "label",
          { for: "dialog-move" },
          move,
          h("span", {}, "Move: other nodes take over what lies nowhere else. For a node that leaves for good."),
        ),
      ],
      "Drain",
      async () => {
        await post(`/v1/nodes/${part(node)}/drain`, { move: move.checked });
        return `Node ${node} is to drain${move.checked ? ", and its blocks move" : ""}: the map shows how far it is.`;
      },
    );
  },
  undrain({ node }) {
    openDialog(
      `Undrain node ${node}?`,
      [list("It takes part again: new blocks are stored there.", "What was copied to other nodes stays there too.")],
      "Undrain",
      async () => {
        await post(`/v1/nodes/${part(node)}/undrain`);
        return `Node ${node} takes part again.`;
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
        h("p", {}, `It is ${share} % full now: ${many(found?.blocks ?? 0, "block", "blocks")}.`),
        h("label", { for: "dialog-percent" }, "The coldest blocks leave until it is", to, "% full."),
        list(
          "What lies nowhere else is lost, and is computed anew when it is asked for.",
          "What is in use stays, and in DRAM what is not durable yet.",
        ),
      ],
      "Evict",
      async () => {
        const name = volume.slice(found.node_id.length + 1);
        const done = await post(`/v1/volumes/${part(found.node_id)}/${part(name)}/evict`, { to_percent: Number(to.value) });
        return `${evicted(done, ` ${volume}`)}; ${bytes(done.used_bytes)} are in use.`;
      },
    );
  },
  "evict-namespace"({ namespace }) {
    const found = known.namespaces.items.find((one) => one.namespace_id === namespace);
    const name = nameOf(found).join(" · ");
    if (found.pinned)
      return openDialog(
        `${name} is pinned`,
        [
          list(
            "What is pinned is not evicted: unpin it first.",
            "Where its blocks are wrong, invalidate it: that drops them, pinned or not.",
          ),
        ],
        "",
        null,
      );
    const where = h("div", {}, quiet("counting its blocks …"));
    const tiers = ["dram", "nvme"].map((tier) =>
      h("input", { type: "checkbox", id: `dialog-${tier}`, checked: true, value: tier }),
    );
    const mine = openDialog(
      `Evict the blocks of ${name}?`,
      [
        h("p", { class: "quiet" }, h("code", {}, namespace)),
        where,
        h("label", { for: "dialog-dram" }, tiers[0], "from DRAM, of all nodes"),
        h("label", { for: "dialog-nvme" }, tiers[1], "from volumes, of all nodes"),
        list(
          "What lies nowhere else is lost, and is computed anew when it is asked for.",
          "What is in use stays, and in DRAM what is not durable yet. Engines may store it again at once.",
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
    const where = h("div", {}, quiet("counting its blocks …"));
    fillUsage(
      namespace,
      where,
      openDialog(`Where the blocks of ${name} lie`, [h("p", { class: "quiet" }, h("code", {}, namespace)), where], "", null),
    );
  },
  token() {
    const box = h("input", { type: "password", id: "dialog-token", autocomplete: "off", required: true, "aria-label": "Token" });
    openDialog(
      "A token is required",
      [
        h("p", {}, "Ask whoever runs this store for one. With the role read you can look, with the role operator also make changes."),
        h("label", { for: "dialog-token" }, "Token", box),
        h("p", { class: "note" }, "It is kept until this tab is closed, and sent to this server only."),
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
        : h("p", {}, "It has no blocks on any node that answers."),
      found.unreached
        .filter((one) => one.kind !== "unsupported")
        .map((one) => note(`${one.node_id} is not counted: ${one.detail}`)),
    );
  } catch (error) {
    show(where, h("p", { class: "bad" }, `Not counted: ${error.message}.`));
  }
}
