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

/** {keys} or {tokens} of what was pasted. Throws an Error that says what is wrong with it. */
function chainOf(text) {
  if (text.length > MOST_CHARACTERS) throw new Error("That is more than one question may hold: paste the head of it.");
  const words = text.split(/[\s,;"'[\]()]+/).filter(Boolean);
  if (!words.length) throw new Error("Paste token ids or keys first.");
  if (words.every((word) => KEY.test(word))) return { keys: words.map((word) => word.toLowerCase()) };
  const wrong = words.find((word) => !NUMBER.test(word));
  if (wrong !== undefined) {
    throw new Error(`“${wrong.slice(0, 40)}” is neither a token id nor a key of 32 hexadecimal digits.`);
  }
  return { tokens: words.map(Number) };
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
    if (!$("explore-namespace").value) throw new Error("There is no namespace to look in yet.");
    chain = chainOf(box.value);
  } catch (error) {
    complain(error.message);
    box.focus();
    return;
  }
  show($("explored"), quiet("looking …"));
  try {
    const namespace = known.namespaces.items.find((one) => one.namespace_id === $("explore-namespace").value);
    showChain(await post("/v1/blocks/lookup", { namespace_id: namespace.namespace_id, ...chain }), chain, namespace);
  } catch (error) {
    show($("explored"));
    complain(`Not looked up: ${error.message}.`);
    meet(error);
  }
}

function showChain(found, chain, namespace) {
  const { blocks, hit_blocks: hits, runs } = found;
  const per = namespace.spec.block_tokens;
  if (!blocks)
    return show(
      $("explored"),
      quiet(`No full block: a block of this namespace has ${count(per)} tokens, and ${count(chain.tokens.length)} were given.`),
    );
  const rest = chain.tokens ? chain.tokens.length - blocks * per : 0;
  const words = `${count(hits)} of ${many(blocks, "block hits", "blocks hit")}`;
  show(
    $("explored"),
    h(
      "p",
      {},
      h("b", {}, `${words}.`),
      found.first_miss === null ? "" : ` The first miss: ${found.first_miss}.`,
      rest ? h("span", { class: "quiet" }, ` The last ${many(rest, "token is", "tokens are")} no full block.`) : "",
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
      [["blocks", "whole"], ["tokens", "whole"], ["found", "whole"], ["why", "wide"], ["lies on"]],
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
                  `${one.volume_id ?? "a volume epoch that ended"}${one.tier ? ` (${one.tier})` : ""}${one.visible ? "" : ", not heard of"} `,
                ),
              )
            : "nowhere",
        ],
      })),
    ),
  );
}

const span = (start, length) => (length === 1 ? count(start) : `${count(start)} – ${count(start + length - 1)}`);
