// Requests to the REST API of this server. The page contacts no other server.

const QUESTION_MS = 15000;
const CHANGE_MS = 90000;
const TOKEN = "kvstore.token";

/** A failed request. status 0: the server did not respond. */
class Refusal extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** Send a request. Returns {told, tag}: the JSON and its ETag. tag: sent as If-Match with a change. */
async function exchange(method, path, body, tag) {
  const headers = tag === undefined ? {} : { "if-match": tag };
  const token = sessionStorage.getItem(TOKEN);
  if (token) headers.authorization = `Bearer ${token}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const change = method !== "GET" && path !== "/v1/blocks/lookup";
  let answer;
  try {
    answer = await fetch(path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      signal: AbortSignal.timeout(change ? CHANGE_MS : QUESTION_MS),
    });
  } catch (error) {
    throw new Refusal(0, error.name === "TimeoutError" ? "it did not respond in time" : "it cannot be reached");
  }
  let told;
  try {
    told = await answer.json();
  } catch {
    throw new Refusal(answer.ok ? 0 : answer.status, "its response is incomplete, or not from an admin server");
  }
  role = answer.headers.get("x-kvstore-role") ?? role;
  if (!answer.ok) throw new Refusal(answer.status, String(told.detail ?? answer.statusText));
  return { told, tag: answer.headers.get("etag") };
}

const ask = async (...what) => (await exchange(...what)).told;
const get = (path) => ask("GET", path);
const post = (path, body) => ask("POST", path, body);
const part = encodeURIComponent;

/** A resource that is changed only if nobody else changed it. shown: called with each state that was read. */
class Edited {
  constructor(path, shown = () => {}) {
    this.path = path;
    this.shown = shown;
  }

  async look() {
    ({ told: this.now, tag: this.tag } = await exchange("GET", this.path));
    this.shown(this.now);
  }

  /** Change the resource. If another operator changed it after it was read, read it again and change nothing. */
  async change(method, body) {
    try {
      return await ask(method, this.path, body, this.tag);
    } catch (error) {
      if (error.status !== 412) throw error;
      await this.look();
      throw new Refusal(412, "another operator changed it. The current state is shown above; confirm again to replace it");
    }
  }
}

/** Last responses by name, and the errors of requests that failed since. */
const known = {};
const failed = {};

const QUESTIONS = {
  cluster: "/v1/cluster",
  shards: "/v1/index/shards",
  overview: "/v1/overview?loads=50",
  namespaces: "/v1/namespaces?limit=500",
  decisions: "/v1/decisions?limit=10",
};

/** Requests that are sent once per SELDOM_ROUNDS rounds, and after each change. */
const SELDOM = { tenants: "/v1/tenants?limit=100" };
const SELDOM_ROUNDS = 5;

/** Parts of /v1/overview, for which each node is queried once. */
const TOGETHER = {
  nodes: (told) => ({ items: told.nodes, hidden: told.known_nodes - told.nodes.length }),
  activity: (told) => ({ items: told.activity, unreached: told.unreached }),
  volumes: (told) => ({ items: told.volumes }),
  slow: (told) => ({ items: told.slow_loads, unreached: told.unreached }),
};

/** Send all requests once and keep failures in `failed`. all: send those of SELDOM, too. Returns the failures. */
async function look(all) {
  const questions = all ? { ...QUESTIONS, ...SELDOM } : QUESTIONS;
  const names = Object.keys(questions);
  const answers = await Promise.allSettled(names.map((name) => get(questions[name])));
  answers.forEach((answer, at) => {
    const name = names[at];
    if (answer.status === "fulfilled") {
      known[name] = answer.value;
      delete failed[name];
    } else failed[name] = answer.reason;
  });
  for (const [name, part_] of Object.entries(TOGETHER)) {
    if (failed.overview) failed[name] = failed.overview;
    else {
      known[name] = part_(known.overview);
      delete failed[name];
    }
  }
  const refused = answers.filter((answer) => answer.status === "rejected").map((answer) => answer.reason);
  const away = refused.length === names.length;
  if (!away && (all || historyDue())) await Promise.all([readHistory(), readEvents()]);
  return { refused, away };
}

let heardAt = null; // time of the last response of the store
let isAway = false; // no request of the last round succeeded; the banner shows why

/** Notes that the figures of some requests are old. */
function stale(...names) {
  const failures = [...new Set(names.filter((name) => failed[name]).map((name) => failed[name].message))];
  if (failures.length && isAway && heardAt !== null) return note(`Figures of ${clock(heardAt)}.`);
  return failures.map((message) => h("p", { class: "note bad" }, `Figures are old: ${message}`));
}
