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
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

function unpackIntegers(text) {
  const values = [];
  let value = 0;
  let weight = 1;
  for (const byte of bytesOf(text)) {
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

function hexBytes(hex) {
  return Uint8Array.from(hex.match(/../g) ?? [], (pair) => parseInt(pair, 16));
}

// One text per token. A character spread over several tokens stands at the first of them.
function tokenTexts(numbers) {
  const texts = numbers.map((token) =>
    BYTES.has(token) ? WORDS.texts[token].replace(/../g, "\\x$&") : WORDS.texts[token]);
  for (let first = 0; first < numbers.length; first += 1) {
    let joined = [];
    for (let last = first; last < numbers.length && BYTES.has(numbers[last]); last += 1) {
      joined = [...joined, ...hexBytes(WORDS.texts[numbers[last]])];
      if (joined.length > 8) break;
      let text;
      try {
        text = DECODER.decode(new Uint8Array(joined));
      } catch {
        continue;
      }
      texts[first] = text;
      texts.fill("", first + 1, last + 1);
      first = last;
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
