// Owns how text and elements get into the document: as text nodes only, with nothing hidden in them.

// The same ranges as learner/visible.py.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;
const FIRST_CHARACTERS = 3000;

function codePoint(character) {
  return "U+" + character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
}

// Append text; control, direction and invisible characters become small labels.
function addText(parent, text) {
  let from = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > from) parent.append(text.slice(from, match.index));
    const label = document.createElement("span");
    label.className = "hidden-character";
    label.textContent = codePoint(match[0]);
    parent.append(label);
    from = match.index + match[0].length;
  }
  if (from < text.length) parent.append(from ? text.slice(from) : text);
  return parent;
}

function plainText(text) {
  return text.replace(HIDDEN, (character) => "⟨" + codePoint(character) + "⟩");
}

// Make an element. Strings among the children are text; attributes are set as attributes.
function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (typeof child === "string") addText(element, child);
    else element.append(child);
  }
  return element;
}

function withAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function button(label, title, action, className = "") {
  const element = make("button", className, label);
  element.type = "button";
  element.title = title;
  element.addEventListener("click", action);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

function draw(tag, attributes, text) {
  const element = withAttributes(document.createElementNS(SVG, tag), attributes);
  if (text !== undefined) element.textContent = text;
  return element;
}

// Text of any length: the first part at once, the rest on request.
function longText(className, text) {
  const box = make("span", className);
  let shown = 0;
  const more = button("", "", () => grow(shown * 8), "more");
  const grow = (limit) => {
    // A surrogate pair must not be cut in two.
    let stop = Math.min(limit, text.length);
    if (stop < text.length && /[\ud800-\udbff]/.test(text[stop - 1])) stop -= 1;
    more.remove();
    addText(box, text.slice(shown, stop));
    shown = stop;
    if (shown < text.length) {
      more.textContent = count(text.length - shown) + " more characters";
      box.append(more);
    }
  };
  grow(FIRST_CHARACTERS);
  return box;
}

// Small pictures, drawn as paths so that no font decides how they look.
const PICTURES = {
  search: "M6.5 2a4.5 4.5 0 1 1 0 9a4.5 4.5 0 0 1 0-9M10 10l4 4",
  answer: "M2.5 8.5l3.5 3.5l7.5-8",
  none: "M4 4l8 8M12 4l-8 8",
  again: "M13 8a5 5 0 1 1-1.6-3.7M12 1.5v3.2h-3.2",
};

function picture(name) {
  const svg = draw("svg", { class: "picture", viewBox: "0 0 16 16", "aria-hidden": "true" });
  svg.append(draw("path", { d: PICTURES[name] }));
  return svg;
}

const MINUS = "\u2212";

function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const text = Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 10 ** -digits / 2)
    ? Math.abs(value).toExponential(2)
    : String(+Math.abs(value).toFixed(digits));
  return (value < 0 && +text !== 0 ? MINUS : "") + text;
}

function signed(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  return (value > 0 ? "+" : "") + number(value, digits);
}

function reward(value) {
  if (value === null || value === undefined) return "–";
  return (value < 0 ? MINUS : "") + Math.abs(value).toFixed(2);
}

function milliseconds(seconds) {
  return seconds < 0.001 ? "under 1 ms" : count(seconds * 1000) + " ms";
}

function count(value) {
  return Math.round(value).toLocaleString("en-US");
}

function plural(value, one, many = one + "s") {
  return count(value) + " " + (value === 1 ? one : many);
}

// A strength from 0 to 8, by which style sheets shade.
function bucket(share) {
  return share > 0 ? Math.max(1, Math.min(8, Math.round(share * 8))) : 0;
}
