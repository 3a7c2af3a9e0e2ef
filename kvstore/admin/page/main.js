// Rounds of requests with a bounded rate, and drawing of the responses.

const EVERY_MS = 2000;
const MOST_MS = 30000;

let held = false;
let wait = EVERY_MS;
let timer = 0;
let busy = false;
let wanted = false; // another round was requested during a round
let awaySince = null;
let turn = 0; // rounds since all requests were sent

/** Ask for a token if an error requires one. */
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
  let unknown;
  try {
    unknown = await lookAndDraw();
  } catch (error) {
    // such as a response of another version, after an upgrade: the next round may succeed
    turn = 0;
    $("away").hidden = false;
    show($("away"), `This page cannot show the response of the server: ${error.message}. Reload the page if this stays.`);
  } finally {
    busy = false;
  }
  if (unknown) {
    meet(unknown);
    return;
  }
  plan(wanted ? 100 : wait);
}

/** Send the requests of one round and draw the responses. Returns the error if a token is required. */
async function lookAndDraw() {
  const all = turn === 0;
  turn = (turn + 1) % SELDOM_ROUNDS;
  const { refused, away } = await look(all);
  if (away) turn = 0;
  await followChecks();
  const unknown = refused.find((error) => error.status === 401);
  if (sessionStorage.getItem(TOKEN)) $("token").hidden = false;
  isAway = away;
  if (away) awaySince ??= new Date();
  else {
    heardAt = new Date();
    awaySince = null;
    updateRates(performance.now());
  }
  draw();
  wait = away ? Math.min(MOST_MS, wait * 2) : EVERY_MS;
  showAway(away && !unknown ? refused[0] : null, unknown);
  return unknown;
}

function draw() {
  const views = [showHealth, showNodes, showShards, showCharts, showTimeline, showSlow, showNamespaces, showTenants, showDecisions];
  for (const view of views) view();
  document.querySelectorAll("#whole button, #quotas button").forEach(guard);
}

function plan(ms) {
  clearTimeout(timer);
  if (!held && !document.hidden) timer = setTimeout(round, ms);
  showFresh();
}

/** Start a round now, because something was changed or a person requested it. */
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
    h("button", { type: "button", "data-do": "again" }, "Try now"),
  );
}

/** The server that does not answer, since when, why, and the consequences. */
function awayWords(error) {
  const since = `since ${clock(awaySince)}`;
  if (error.status === 0) return `The admin server does not answer ${since}: ${error.message}. The store itself is not affected.`;
  const [, address, reason] = UNREACHED.exec(error.message) ?? [];
  const effect = "Lookups find nothing until it answers: engines compute their prompts. Stores continue, and no stored block is lost.";
  if (address === undefined) return `The metadata server does not answer ${since}: ${error.message}. ${effect}`;
  const restart = reason === "connection refused" ? " Restart it: its index survives." : "";
  return `The metadata server (${address}) does not answer ${since}: ${reason}. ${effect}${restart}`;
}

function showFresh() {
  const looks = role !== null && role !== "operator" ? ` · role ${role}: changes require operator` : "";
  show($("fresh"), heardAt === null ? "" : `${held ? "paused, " : ""}updated ${clock(heardAt)}${looks}`);
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
$("nodes-filter").addEventListener("input", showNodes);
$("namespaces-filter").addEventListener("input", () => {
  namespacesPage.at = 0;
  showNamespaces();
});
$("explorer").addEventListener("submit", explore);
$("explore-kind").addEventListener("change", showInput);
$("dialog-form").addEventListener("submit", confirmed);
$("dialog-no").addEventListener("click", () => $("dialog").close());
$("dialog").addEventListener("close", closed);
$("dialog").addEventListener("keydown", trap);
document.addEventListener("visibilitychange", () => plan(0));
window.addEventListener("hashchange", () => {
  route();
  draw();
  again();
});
route();
learnTokenizer();
round();
