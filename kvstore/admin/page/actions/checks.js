// Checks of durable volumes. Running checks are polled; others are read once, and when their dialog opens.

const CHECK_MB_PER_S = 200;
const MOST_ASKED = 16; // volumes whose checks are read when the page opens
const checks = new Map(); // volume -> {found, ended: time, lost: why the progress is unknown}
let askedChecks = false;

const checkable = (volume) => volume.tier === "nvme" && volume.node_alive;
const underWay = (found) => found.state === "waiting" || found.state === "running";

const checkPath = ({ node_id: node, volume_id: id }) => `/v1/volumes/${part(node)}/${part(id.slice(node.length + 1))}/check`;
const volumeOf = (id) => known.volumes.items.find((one) => one.volume_id === id);

function noteCheck(volume, found) {
  const ended = new Date(Date.now() - (found.began_ago_s - found.took_s) * 1000);
  checks.set(volume.volume_id, { volume, found, ended, lost: null });
}

/** Read the progress of running checks, after each round. */
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

/** State of a check as [text, tone]. */
function checkWords({ found, ended }) {
  const wrong = [
    found.bad_blocks
      ? `${count(found.bad_blocks)} bad and removed${found.rewritten_blocks ? `, ${count(found.rewritten_blocks)} of them written again` : ""}`
      : "",
    found.unreadable_blocks ? `${count(found.unreadable_blocks)} unreadable` : "",
  ]
    .filter(Boolean)
    .join(", ");
  const looked = `${count(found.checked_blocks)} of ${many(found.blocks, "block", "blocks")}`;
  const tone = wrong ? "bad" : "quiet";
  switch (found.state) {
    case "waiting":
      return ["the check waits for the check of another volume of the node", tone];
    case "running":
      return [`check running: ${looked}, ${wrong || "none bad so far"}`, tone];
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
      return ["no check is known: the node restarted", "warn"];
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
    lost ? h("p", { class: "small bad" }, `Progress unknown: ${lost}`) : null,
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
    const last = h("div", {}, quiet("reading its last check …"));
    const mine = openDialog(
      `Check ${id}?`,
      [
        list(
          "Every block on the volume is read and compared with its checksums, while the volume serves.",
          "Bad blocks are removed and become misses. Blocks that are also in DRAM are written again.",
        ),
        h("label", { for: "dialog-speed" }, "Read at most", speed, "MB per second."),
        last,
      ],
      "Check",
      async () => {
        const found = await post(checkPath(volume), { bytes_per_s: Math.round(Number(speed.value) * 1e6) });
        noteCheck(volume, found);
        return `The check of ${id} has started. The view of its node shows the progress.`;
      },
      "main",
    );
    try {
      const found = await get(checkPath(volume));
      if (found.state !== "none") noteCheck(volume, found);
      if (mine !== asking) return;
      const [text, tone] =
        found.state === "none" ? ["no check was started since its node started", "quiet"] : checkWords(checks.get(id));
      show(last, h("p", { class: tone }, `${text[0].toUpperCase()}${text.slice(1)}.`));
    } catch (error) {
      if (mine === asking) show(last, h("p", { class: "bad" }, `Its last check is unknown: ${error.message}.`));
    }
  },
  "check-cancel"({ volume: id }) {
    const volume = volumeOf(id);
    openDialog(
      `Cancel the check of ${id}?`,
      [list("It ends after the current read.", "Blocks that it found bad stay removed.")],
      "Cancel the check",
      async () => {
        noteCheck(volume, await ask("DELETE", checkPath(volume)));
        return `The check of ${id} is cancelled.`;
      },
    );
  },
});
