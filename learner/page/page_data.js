// Owns reading the data blocks: the index at once, a group's turns when they are first looked at.

const parseBlock = (id) => JSON.parse(document.getElementById(id).textContent);

const INDEX = parseBlock("index");
const WORDS = parseBlock("vocabulary");
const SPECIAL = new Set(WORDS.special);
const BYTES = new Set(WORDS.bytes);
const UNKNOWN = new Set(WORDS.unknown);
const STEPS = INDEX.steps;
const STEP_OF = new Map(STEPS.map((step) => [step.step, step]));

const GROUPS = INDEX.groups.map((card, position) => ({
  ...card,
  position,
  hidden_leaves: card.hidden_leaves ?? 0,
  staleness: card.staleness ?? 0,
  policy_version: card.policy_version ?? 0,
  leaves: card.leaves.map(([tree, node, name, value, outcome, answer, advantage]) => ({
    tree, node, name, reward: value, outcome, answer, advantage,
  })),
}));
const GROUP_OF = new Map(GROUPS.map((group) => [group.step + " " + group.uid, group]));

function findGroup(uid, step) {
  return GROUP_OF.get(step + " " + uid) ?? GROUPS.find((group) => group.uid === uid) ?? null;
}

function bytesOf(text) {
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let at = 0; at < bytes.length; at += 1) bytes[at] = characters.charCodeAt(at);
  return bytes;
}

function unpackIntegers(text) {
  const values = [];
  const bytes = bytesOf(text);
  let value = 0;
  let weight = 1;
  for (let at = 0; at < bytes.length; at += 1) {
    const byte = bytes[at];
    value += (byte & 127) * weight;
    weight *= 128;
    if (byte < 128) {
      values.push(value);
      value = 0;
      weight = 1;
    }
  }
  return values;
}

function unpackFloats(text) {
  return new Float32Array(bytesOf(text).buffer);
}

const DECODER = new TextDecoder("utf-8", { fatal: true });

// By token: its bytes where it is part of a character, and its text when it stands alone.
const RAW = [];
for (const token of WORDS.bytes) RAW[token] = (WORDS.texts[token].match(/../g) ?? []).map((pair) => parseInt(pair, 16));
const ALONE = WORDS.texts.map((text, token) => BYTES.has(token) ? text.replace(/../g, "\\x$&") : text);

// Whether bytes are whole characters (1), the beginning of some (0), or neither (-1).
function wholeness(bytes) {
  for (let at = 0; at < bytes.length;) {
    const lead = bytes[at];
    const size = lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
    if (!size) return -1;
    for (let next = at + 1; next < at + size; next += 1) {
      if (next >= bytes.length) return 0;
      if ((bytes[next] & 0xc0) !== 0x80) return -1;
    }
    at += size;
  }
  return 1;
}

function decodeWhole(bytes) {
  try {
    return DECODER.decode(new Uint8Array(bytes));
  } catch {
    return null;
  }
}

// One text per token. A character spread over several tokens stands at the first of them.
function tokenTexts(numbers) {
  const texts = numbers.map((token) => ALONE[token]);
  for (let first = 0; first < numbers.length; first += 1) {
    if (RAW[numbers[first]] === undefined) continue;
    const joined = [];
    for (let last = first; last < numbers.length && RAW[numbers[last]] !== undefined; last += 1) {
      joined.push(...RAW[numbers[last]]);
      const state = wholeness(joined);
      if (state === 0) continue;
      const text = state === 1 ? decodeWhole(joined) : null;
      if (text !== null) {
        texts[first] = text;
        texts.fill("", first + 1, last + 1);
        first = last;
      }
      break;
    }
  }
  return texts;
}

// Tokens as they are shown and searched: numbers of the vocabulary, texts, and the joined text.
function readTokens(packed) {
  const numbers = unpackIntegers(packed);
  const texts = tokenTexts(numbers);
  return { numbers, texts, text: texts.join("") };
}

// The text alone, for searching: it is not kept.
function textOf(packed) {
  return tokenTexts(unpackIntegers(packed)).join("");
}

const BLOCKS = new Map();

// A group's block, with children, leaves and members linked up.
function blockOf(group) {
  if (!BLOCKS.has(group)) BLOCKS.set(group, readBlock(group));
  return BLOCKS.get(group);
}

function readBlock(group) {
  const block = parseBlock("group-" + group.step + "-" + group.uid);
  const members = new Map((block.members ?? []).map((member) => [member.leaf.join(" "), member]));
  const cards = new Map(group.leaves.map((leaf) => [leaf.tree + " " + leaf.node, leaf]));
  block.trees.forEach((tree, place) => {
    tree.unborn ??= [];
    tree.nodes.forEach((node, position) => {
      Object.assign(node, { tree: place, position, parent: node.parent ?? -1, children: [] });
      node.depth ??= 0;
      node.advantage ??= null;
      if (node.parent >= 0) tree.nodes[node.parent].children.push(position);
      node.member = members.get(place + " " + position) ?? null;
      node.leaf = cards.get(place + " " + position) ?? null;
    });
  });
  return block;
}

function nodeTokens(node) {
  node.read ??= readTokens(node.tokens ?? "");
  return node.read;
}

function observationTokens(node) {
  const seen = node.observation;
  if (!seen) return null;
  seen.read ??= readTokens(seen.tokens ?? "");
  return seen.read;
}

function promptTokens(block) {
  block.read ??= readTokens(block.prompt);
  return block.read;
}

function pathTo(tree, position) {
  const path = [];
  for (let at = position; at >= 0; at = tree.nodes[at].parent) path.unshift(tree.nodes[at]);
  return path;
}

// The first ended node at or below a node; the node itself when there is none.
function firstLeaf(tree, position) {
  const node = tree.nodes[position];
  if (node.leaf) return position;
  for (const child of node.children) {
    const found = firstLeaf(tree, child);
    if (tree.nodes[found].leaf) return found;
  }
  return position;
}
