// Checks of durable volumes: those known to be under way are followed; others are asked for once, and where a dialog is opened.

const CHECK_MB_PER_S = 200;
const MOST_ASKED = 16; // volumes whose checks are asked for when the page is opened
const checks = new Map(); // volume -> {found, ended: when, lost: why it is not known how far it is}
let askedChecks = false;

const checkable = (volume) => volume.tier === "nvme" && volume.node_alive;
const underWay = (found) => found.state === "waiting" || found.state === "running";

const checkPath = ({ node_id: node, volume_id: id }) => `/v1/volumes/${part(node)}/${part(id.slice(node.length + 1))}/check`;
const volumeOf = (id) => known.volumes.items.find((one) => one.volume_id === id);

function noteCheck(volume, found) {
  const ended = new Date(Date.now() - (found.began_ago_s - found.took_s) * 1000);
  checks.set(volume.volume_id, { volume, found, ended, lost: null });
}

/** After each look: how far those are that were under way. */
async function followChecks() {
  const open = [...checks.values()].filter(({ found }) => underWay(found)).map(({ volume }) => volume);
  const others = askedChecks || !known.volumes ? [] : known.volumes.items.filter(checkable).slice(0, MOST_ASKED);
  askedChecks ||= Boolean(known.volumes);
  await Promise.all(
    [...open, ...others].map(async (volume) => {
      try {
        const found = await get(checkPath(volume));
        if (checks.has(volume.volume_id) || found.state !== "none") noteCheck(volume, found);
      } catch (error) {
        const check = checks.get(volume.volume_id);
        if (check) check.lost = error.message;
      }
    }),
  );
}

/** What is said of a check in words, and how bad it is. */
function checkWords({ found, ended }) {
  const wrong = [
    found.bad_blocks
      ? `${count(found.bad_blocks)} bad and taken out${found.rewritten_blocks ? `, ${count(found.rewritten_blocks)} of them written anew` : ""}`
      : "",
    found.unreadable_blocks ? `${count(found.unreadable_blocks)} unreadable` : "",
  ]
    .filter(Boolean)
    .join(", ");
  const looked = `${count(found.checked_blocks)} of ${many(found.blocks, "block", "blocks")}`;
  const tone = wrong ? "bad" : "quiet";
  switch (found.state) {
    case "waiting":
      return ["check waits for that of another volume of the node", tone];
    case "running":
      return [`check under way: ${looked}, ${wrong || "none bad so far"}`, tone];
    case "done":
      return [
        `checked at ${clock(ended)}, in ${seconds(found.took_s)}: ${many(found.checked_blocks, "block", "blocks")}, ${wrong || "none bad"}`,
        wrong ? "bad" : "ok",
      ];
    case "cancelled":
      return [`check cancelled at ${clock(ended)}, after ${looked}: ${wrong || "none bad"}`, tone];
    case "failed":
      return [`check failed at ${clock(ended)}, after ${looked}: ${found.why}${wrong ? `; ${wrong}` : ""}`, "bad"];
    default:
      return ["no check is known: the node was started since", "warn"];
  }
}

function checkLine(volume) {
  const check = checks.get(volume.volume_id);
  if (!check) return null;
  const { found, lost } = check;
  const [text, tone] = checkWords(check);
  const open = underWay(found);
  return h(
    "div",
    { class: "check" },
    h("p", { class: `small ${tone}` }, `${text}.`),
    lost ? h("p", { class: "small bad" }, `Not asked anew: ${lost}`) : null,
    open
      ? [
          bar(found.blocks ? found.checked_blocks / found.blocks : 0, `${volume.volume_id}: ${text}`, false),
          volumeButton("check-cancel", volume, "Cancel …", `Cancel the check of ${volume.volume_id} …`),
        ]
      : null,
  );
}

Object.assign(ACTS, {
  async check({ volume: id }) {
    const volume = volumeOf(id);
    const speed = h("input", {
      type: "number",
      id: "dialog-speed",
      min: 1,
      max: 100000,
      step: 1,
      required: true,
      value: CHECK_MB_PER_S,
    });
    const last = h("div", {}, quiet("asking for its last check …"));
    const mine = openDialog(
      `Check ${id}?`,
      [
        list(
          "Every block that it holds is read and compared with its checksums, while it serves.",
          "What is bad is taken out: a miss from then on. What DRAM has too is written anew.",
        ),
        h("label", { for: "dialog-speed" }, "It reads at most", speed, "MB a second."),
        last,
      ],
      "Check",
      async () => {
        const found = await post(checkPath(volume), { bytes_per_s: Math.round(Number(speed.value) * 1e6) });
        noteCheck(volume, found);
        return `${id} is checked: its node’s card shows how far it is.`;
      },
      "main",
    );
    try {
      const found = await get(checkPath(volume));
      if (found.state !== "none") noteCheck(volume, found);
      if (mine !== asking) return;
      const [text, tone] =
        found.state === "none" ? ["no check was begun since its node was started", "quiet"] : checkWords(checks.get(id));
      show(last, h("p", { class: tone }, `${text[0].toUpperCase()}${text.slice(1)}.`));
    } catch (error) {
      if (mine === asking) show(last, h("p", { class: "bad" }, `Its last check is not known: ${error.message}.`));
    }
  },
  "check-cancel"({ volume: id }) {
    const volume = volumeOf(id);
    openDialog(
      `Cancel the check of ${id}?`,
      [list("It ends after the read that is under way.", "What it found bad until then stays out.")],
      "Cancel the check",
      async () => {
        noteCheck(volume, await ask("DELETE", checkPath(volume)));
        return `The check of ${id} is called off.`;
      },
    );
  },
});
