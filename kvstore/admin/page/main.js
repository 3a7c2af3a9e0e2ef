// Asks again and again, with a bound on how often, and shows what came.

const EVERY_MS = 2000;
const MOST_MS = 30000;

let held = false;
let wait = EVERY_MS;
let timer = 0;
let busy = false;
let wanted = false; // somebody asked for another look while one was under way
let awaySince = null;
let turn = 0; // of rounds, since all was asked last

/** What an error means for the page as a whole. */
function meet(error) {
  if (!(error instanceof Refusal) || error.status !== 401) return;
  $("token").hidden = false;
  if (!$("dialog").open) ACTS.token();
}

async function round() {
  if (busy) {
    wanted = true;
    return;
  }
  busy = true;
  wanted = false;
  clearTimeout(timer);
  const all = turn === 0;
  turn = (turn + 1) % SELDOM_ROUNDS;
  const { refused, away } = await look(all);
  if (away) turn = 0;
  await followChecks();
  const unknown = refused.find((error) => error.status === 401);
  if (sessionStorage.getItem(TOKEN)) $("token").hidden = false;
  isAway = away;
  if (!away) {
    heardAt = new Date();
    awaySince = null;
    reckon(performance.now());
    watchFaults(Date.now());
  }
  const drawn = [showHealth, showNodes, showCharts, showSlow, showNamespaces, showTenants, showFaults, showDecisions];
  if (away) awaySince ??= new Date();
  for (const draw of drawn) draw();
  document.querySelectorAll("#whole button, #quotas button").forEach(guard);
  wait = away ? Math.min(MOST_MS, wait * 2) : EVERY_MS;
  showAway(away && !unknown ? refused[0] : null, unknown);
  busy = false;
  if (unknown) {
    meet(unknown);
    return;
  }
  plan(wanted ? 100 : wait);
}

function plan(ms) {
  clearTimeout(timer);
  if (!held && !document.hidden) timer = setTimeout(round, ms);
  showFresh();
}

/** Looks again at once: somebody changed something, or asked. */
function again() {
  wait = EVERY_MS;
  turn = 0;
  round();
}

const UNREACHED = /^cannot reach the metadata server at (\S+): (.*)$/s;

function showAway(error, unknown) {
  const figures = heardAt === null ? "" : ` Figures below are of ${clock(heardAt)}.`;
  const box = $("away");
  box.hidden = !error && !unknown;
  if (unknown)
    return show(
      box,
      `A token is required.${figures} `,
      h("button", { type: "button", "data-do": "token" }, "Enter token …"),
    );
  if (!error) return show(box);
  return show(
    box,
    `${awayWords(error)}${figures} The next attempt is in ${wait / 1000} s. `,
    h("button", { type: "button", "data-do": "again" }, "Ask now"),
  );
}

/** What is away, since when, why, and what that means. */
function awayWords(error) {
  const since = `since ${clock(awaySince)}`;
  if (error.status === 0) return `The admin server does not answer ${since}: ${error.message}. The store itself is not affected.`;
  const [, address, reason] = UNREACHED.exec(error.message) ?? [];
  const effect = "Lookups find nothing until it answers: engines compute their prompts. Stores go on, and nothing stored is lost.";
  if (address === undefined) return `The metadata server gives no answers ${since}: ${error.message}. ${effect}`;
  const restart = reason === "connection refused" ? " Restart it: its index survives." : "";
  return `The metadata server (${address}) does not answer ${since}: ${reason}. ${effect}${restart}`;
}

function showFresh() {
  const looks = role !== null && role !== "operator" ? ` · role ${role}: changes require operator` : "";
  show($("fresh"), heardAt === null ? "" : `${held ? "paused, " : ""}as of ${clock(heardAt)}${looks}`);
}

ACTS.again = again;

document.addEventListener("click", (event) => {
  const found = event.target.closest?.("[data-do]");
  if (found) ACTS[found.dataset.do](found.dataset);
});
$("hold").addEventListener("click", () => {
  held = !held;
  $("hold").setAttribute("aria-pressed", String(held));
  if (held) plan(0);
  else again();
});
$("token").addEventListener("click", () => ACTS.token());
$("explorer").addEventListener("submit", explore);
$("dialog-form").addEventListener("submit", confirmed);
$("dialog-no").addEventListener("click", () => $("dialog").close());
$("dialog").addEventListener("close", closed);
$("dialog").addEventListener("keydown", trap);
document.addEventListener("visibilitychange", () => plan(0));
round();
