// Figures of the last hour of the whole store or of the node that is shown, and cluster events.

const HISTORY_STEP_S = 10;
/** The last minute is read again with each request: the latency of each node is that of its loads in this time. */
const RECENT_S = 70;
const MOST_EVENTS = 500;
const history = { path: "", points: [], faults: [], events: [], offset_s: 0, askedAt: -Infinity };

const historyDue = () => performance.now() - history.askedAt > HISTORY_STEP_S * 1000 || history.path !== historyPath();
const historyPath = () => (shownNode === null ? "/v1/history" : `/v1/history?node=${part(shownNode)}`);

/** Read the points that are new, or all of them if another node is shown. */
async function readHistory() {
  const path = historyPath();
  if (path !== history.path) Object.assign(history, { path, points: [], faults: [] });
  history.askedAt = performance.now();
  if (shownNode !== null && !known.nodes?.items.some((one) => one.node_id === shownNode)) return; // unknown: its view says so
  const known_s = history.points.length ? history.points[history.points.length - 1].at_s - RECENT_S : 0;
  try {
    const found = await get(`${path}${path.includes("?") ? "&" : "?"}since=${known_s}`);
    if (path !== historyPath()) return;
    const kept = (one) => one.at_s <= known_s && one.at_s > found.now_s - HOUR_S;
    history.points = [...history.points.filter(kept), ...found.points];
    history.faults = [...found.faults, ...history.faults.filter(kept)];
    history.offset_s = found.now_s - Date.now() / 1000;
    known.history = found;
    delete failed.history;
  } catch (error) {
    failed.history = error;
  }
}

/** Read the cluster events that are new. They come oldest first, in pages. */
async function readEvents() {
  const last = history.events[history.events.length - 1];
  const since_s = last ? Math.min(86400, Math.max(1, serverNow() - last.at_s + HISTORY_STEP_S)) : 0;
  const ids = new Set(history.events.map((one) => one.id));
  let cursor = "";
  try {
    do {
      const found = await get(`/v1/cluster-events?limit=${MOST_EVENTS}&since=${since_s}${cursor}`);
      history.events.push(...found.items.filter((one) => !ids.has(one.id)));
      cursor = found.next_cursor === null ? null : `&cursor=${part(found.next_cursor)}`;
    } while (cursor !== null);
    delete failed.events;
  } catch (error) {
    failed.events = error;
  }
  history.events = history.events.slice(-MOST_EVENTS);
}

/** Present time of the server, in seconds of Unix time: the clock of this computer may differ. */
const serverNow = () => Date.now() / 1000 + history.offset_s;

/** The newest point that has a value, if it is at most `age_s` old. */
function newest(value, age_s = 60) {
  const found = [...history.points].reverse().find((point) => value(point) !== null);
  return found && found.at_s > serverNow() - age_s ? found : null;
}
