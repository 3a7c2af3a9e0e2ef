// Elements, made of data: everything that the store says is text here, never markup.

const SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);

/** An element; attributes that are null or false are left out. Children are elements, text, or lists of them. */
function h(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

/** The role that the server names with its answers; null: it was not asked yet. */
let role = null;
const LOOKS = new Set(["again", "token", "usage"]);

/** Disables a button that changes something where the role does not allow it, and says which role is needed. */
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

/** Shows children in an element. What is there and stays the same is kept, with the focus that it may have. */
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
 * A table that becomes a list of entries on a narrow screen, for which each cell names its column.
 * columns: [label, kind], kind "number", "acts" or nothing. rows: {key, cells}; cells are texts, elements or lists of them.
 */
function table(caption, columns, rows) {
  const heads = columns.map(([label, kind]) =>
    h(
      "th",
      { scope: "col", role: "columnheader", class: kind || null },
      kind === "acts" ? h("span", { "aria-label": label }) : label,
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
