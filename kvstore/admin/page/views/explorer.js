// The prefix explorer.

const MOST_CHARACTERS = 3_500_000;
const KEY = /^[0-9a-f]{32}$/i;
const NUMBER = /^[0-9]{1,10}$/;

function offerNamespaces(all) {
  const choice = $("explore-namespace");
  const chosen = choice.value;
  show(
    choice,
    all.map(({ namespace_id: id, ...one }) => h("option", { value: id }, `${nameOf(one).join(" · ")} — ${id.slice(0, 12)}…`)),
  );
  if (all.some((one) => one.namespace_id === chosen)) choice.value = chosen;
}

let hasTokenizer = false;

/** Ask once whether the server accepts text. */
async function learnTokenizer() {
  try {
    hasTokenizer = (await get("/v1/tokenizer")).configured;
  } catch {
    hasTokenizer = false; // token ids are always accepted
  }
  showInput();
}

const givesText = () => hasTokenizer && $("explorer").elements["explore-kind"].value === "text";

/** Show which inputs the explorer accepts. */
function showInput() {
  $("explore-kind").hidden = !hasTokenizer;
  const text = givesText();
  show(
    $("explore-label"),
    text ? "Text of the prompt, from its start" : "Token ids, or keys of 32 hexadecimal digits, from the start of the prompt",
  );
  $("explore-chain").placeholder = text ? "You are a helpful assistant …" : "101, 2023, 2003 …";
  const hint = text
    ? "The admin server's tokenizer adds its special tokens. The namespace must be of the same model."
    : "To paste text, set admin.tokenizer at the admin server to a local tokenizer.json or model folder.";
  show($("explore-hint"), hasTokenizer && !text ? "" : hint);
}

/** Parse the input as {keys} or {tokens}. Throws an Error with the reason. */
function chainOf(text) {
  if (text.length > MOST_CHARACTERS) throw new Error("The input is too long for one lookup: paste the start of it.");
  const words = text.split(/[\s,;"'[\]()]+/).filter(Boolean);
  if (!words.length) throw new Error("Paste token ids or keys first.");
  if (words.every((word) => KEY.test(word))) return { keys: words.map((word) => word.toLowerCase()) };
  const wrong = words.find((word) => !NUMBER.test(word));
  if (wrong !== undefined) {
    throw new Error(`“${wrong.slice(0, 40)}” is neither a token id nor a key of 32 hexadecimal digits.`);
  }
  return { tokens: words.map(Number) };
}

function textOf(text) {
  if (text.length > MOST_CHARACTERS) throw new Error("The input is too long for one lookup: paste the start of it.");
  if (!text) throw new Error("Paste the text of a prompt first.");
  return { text };
}

async function explore(event) {
  event.preventDefault();
  const box = $("explore-chain");
  const complain = (text) => {
    show($("explore-error"), text);
    box.setAttribute("aria-invalid", text ? "true" : "false");
  };
  complain("");
  show($("explored"));
  let chain;
  try {
    if (!$("explore-namespace").value) throw new Error("No namespace is registered yet: an engine registers one when it connects.");
    chain = givesText() ? textOf(box.value) : chainOf(box.value);
  } catch (error) {
    complain(error.message);
    box.focus();
    return;
  }
  show($("explored"), quiet("looking up …"));
  try {
    const namespace = known.namespaces.items.find((one) => one.namespace_id === $("explore-namespace").value);
    showChain(await post("/v1/blocks/lookup", { namespace_id: namespace.namespace_id, ...chain }), namespace);
  } catch (error) {
    show($("explored"));
    complain(`Not looked up: ${error.message}.`);
    meet(error);
  }
}

function showChain(found, namespace) {
  const { blocks, hit_blocks: hits, runs, tokens } = found;
  const per = namespace.spec.block_tokens;
  if (!blocks)
    return show(
      $("explored"),
      quiet(`No complete block: a block of this namespace has ${count(per)} tokens, and the input has ${count(tokens)}.`),
    );
  const rest = tokens ? tokens - blocks * per : 0;
  const words = `${count(hits)} of ${many(blocks, "block hits", "blocks hit")}`;
  show(
    $("explored"),
    h(
      "p",
      {},
      h("b", {}, `${words}.`),
      found.first_miss === null ? "" : ` First miss: ${found.first_miss}.`,
      rest ? h("span", { class: "quiet" }, ` The last ${many(rest, "token is", "tokens are")} not a complete block.`) : "",
    ),
    svg(
      "svg",
      { class: "strip", viewBox: `0 0 ${blocks} 10`, preserveAspectRatio: "none", role: "img", "aria-label": words },
      runs.map((run) =>
        svg("rect", { class: run.hit ? "fill-hit" : "fill-miss", x: run.start, y: 0, width: run.count, height: 10 }),
      ),
    ),
    table(
      "runs of blocks",
      [["blocks", "whole"], ["tokens", "whole"], ["found", "whole"], ["why", "wide"], ["replicas"]],
      runs.map((run) => ({
        key: `${run.start}`,
        cells: [
          span(run.start, run.count),
          span(run.start * per, run.count * per),
          h("b", { class: run.hit ? "ok" : "bad" }, run.hit ? "hit" : `miss (${run.state})`),
          run.why,
          run.replicas.length
            ? run.replicas.map((one) =>
                h(
                  "span",
                  { class: one.visible ? null : "quiet" },
                  `${one.volume_id ?? "an ended volume epoch"}${one.tier ? ` (${one.tier})` : ""}${one.visible ? "" : ", not reachable"} `,
                ),
              )
            : "none",
        ],
      })),
    ),
  );
}

const span = (start, length) => (length === 1 ? count(start) : `${count(start)} – ${count(start + length - 1)}`);
