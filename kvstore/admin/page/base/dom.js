// Elements made from data. Text from the store stays text and never becomes markup.

const SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);

/** Create an element. Attributes that are null or false are omitted. Children are elements, text, or lists of them. */
function h(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

/** Role of the token, from the server's responses; null: unknown. */
let role = null;
const LOOKS = new Set(["again", "token", "usage", "sort", "page"]);

/** Disable a button that changes something if the role does not permit it, and name the required role. */
function guard(button) {
  const refused = role !== null && role !== "operator" && !LOOKS.has(button.dataset.do);
  button.disabled = refused;
  if (refused) button.title = `requires the role operator; this token has the role ${role}`;
  else button.removeAttribute("title");
}

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
  if (attributes["data-do"]) guard(element);
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

/** Replace the content of an element. Unchanged descendants stay in the document, so the focus is kept. */
function show(parent, ...children) {
  const wanted = document.createElement("div");
  build(wanted, {}, children);
  mend(parent, wanted);
}

function mend(old, wanted) {
  const fresh = [...wanted.childNodes];
  fresh.forEach((child, at) => {
    const there = old.childNodes[at];
    if (!there) old.append(child);
    else if (!alike(there, child)) there.replaceWith(child);
    else if (child.nodeType === Node.TEXT_NODE) {
      if (there.data !== child.data) there.data = child.data;
    } else {
      mendAttributes(there, child);
      mend(there, child);
    }
  });
  while (old.childNodes.length > fresh.length) old.lastChild.remove();
}

function alike(one, other) {
  return one.nodeName === other.nodeName && one.dataset?.key === other.dataset?.key;
}

function mendAttributes(old, wanted) {
  for (const { name } of [...old.attributes]) if (!wanted.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of wanted.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
}

/**
 * Create a table. On a narrow screen it becomes a list, for which each cell names its column.
 * columns: [label, kind, head]; kind: "number", "acts" or none; head: element shown in place of the label.
 * rows: {key, cells}; a cell is a text, an element or a list of them.
 */
function table(caption, columns, rows) {
  const heads = columns.map(([label, kind, head]) =>
    h(
      "th",
      { scope: "col", role: "columnheader", class: kind || null, "aria-sort": head?.dataset.order },
      kind === "acts" ? h("span", { "aria-label": label }) : (head ?? label),
    ),
  );
  const lines = rows.map(({ key, cells }) =>
    h(
      "tr",
      { role: "row", "data-key": key },
      cells.map((cell, at) =>
        h("td", { role: "cell", class: columns[at][1] || null, "data-label": columns[at][0] }, h("span", {}, cell)),
      ),
    ),
  );
  return h(
    "table",
    { role: "table", "aria-label": caption },
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads)),
    h("tbody", { role: "rowgroup" }, lines),
  );
}

const note = (text) => h("p", { class: "note" }, text);
const quiet = (text) => h("p", { class: "quiet" }, text);
const second = (text) => h("span", { class: "small quiet second" }, text);
