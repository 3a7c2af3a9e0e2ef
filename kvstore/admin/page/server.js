// The REST of this server, and nothing else.

const QUESTION_MS = 15000;
const CHANGE_MS = 90000;
const TOKEN = "kvstore.token";

/** An answer that is no success, or none. status 0: the server does not answer. */
class Refusal extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** {told, tag} of an answer: its JSON, and the ETag of what it shows. tag: of what is changed, as it was seen. */
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
    throw new Refusal(0, error.name === "TimeoutError" ? "it took too long to answer" : "it cannot be reached");
  }
  let told;
  try {
    told = await answer.json();
  } catch {
    throw new Refusal(answer.ok ? 0 : answer.status, "its answer broke off, or is none of an admin server");
  }
  role = answer.headers.get("x-kvstore-role") ?? role;
  if (!answer.ok) throw new Refusal(answer.status, String(told.detail ?? answer.statusText));
  return { told, tag: answer.headers.get("etag") };
}

const ask = async (...what) => (await exchange(...what)).told;
const get = (path) => ask("GET", path);
const post = (path, body) => ask("POST", path, body);
const part = encodeURIComponent;

/** What is changed only as it was seen. shown: called with what it is, each time that it was looked at. */
class Edited {
  constructor(path, shown = () => {}) {
    this.path = path;
    this.shown = shown;
  }

  async look() {
    ({ told: this.now, tag: this.tag } = await exchange("GET", this.path));
    this.shown(this.now);
  }

  /** Where somebody else changed it since it was looked at, nothing is done, and it is looked at again. */
  async change(method, body) {
    try {
      return await ask(method, this.path, body, this.tag);
    } catch (error) {
      if (error.status !== 412) throw error;
      await this.look();
      throw new Refusal(412, "it was changed meanwhile. What it is now is said above; confirm once more to replace that");
    }
  }
}

/** What is known of the store. Each list keeps what it had last, and why it could not be asked anew. */
const known = {};
const failed = {};

const QUESTIONS = {
  cluster: "/v1/cluster",
  overview: "/v1/overview",
  namespaces: "/v1/namespaces?limit=500",
  decisions: "/v1/decisions?limit=10",
};

/** What changes slowly: asked in one of so many rounds, and after each change. */
const SELDOM = { tenants: "/v1/tenants?limit=100" };
const SELDOM_ROUNDS = 5;

/** What of the store is told together, as each node is asked once for all of it. */
const TOGETHER = {
  nodes: (told) => ({ items: told.nodes, hidden: told.known_nodes - told.nodes.length }),
  activity: (told) => ({ items: told.activity, unreached: told.unreached }),
  volumes: (told) => ({ items: told.volumes }),
  slow: (told) => ({ items: told.slow_loads, unreached: told.unreached }),
};

/** Asks everything once, all: what changes slowly, too; what is not answered is noted in `failed`. What was refused. */
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
  return { refused, away: refused.length === names.length };
}

let heardAt = null; // when the store answered last
let isAway = false; // nothing was answered in the last round: the banner says why

/** Says that what is shown of some lists is old. */
function stale(...names) {
  const failures = [...new Set(names.filter((name) => failed[name]).map((name) => failed[name].message))];
  if (failures.length && isAway && heardAt !== null) return note(`Figures of ${clock(heardAt)}.`);
  return failures.map((message) => h("p", { class: "note bad" }, `Figures are old: ${message}`));
}
