// Steps of an answer: the rejected drafts, acceptance by depth, the draft tree as an SVG picture. Does not use the page.
// A step is what the server sends: {nodes: [{id, text, parent, source}], accepted: [node], tokens: [{id, text, name, source}], time_s}.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const CELL_W = 118, CELL_H = 34;

// -- small helpers ---------------------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
const short = (text) => ([...text].length > 10 ? [...text].slice(0, 9).join("") + "…" : text);
const number = (value, digits = 1) => (Number.isFinite(value) ? value.toFixed(digits) : "–");

// -- accepted and rejected drafts ---------------------------------------------------------------------------------

function rejectedBranches(step) { // a path of nodes for each rejected leaf, from below the last accepted node on it
  const taken = new Set([0, ...step.accepted]);
  const parents = new Set(step.nodes.map((node) => node.parent));
  const leaves = step.nodes.map((_, node) => node).filter((node) => !parents.has(node) && !taken.has(node));
  return leaves.map((leaf) => {
    const path = [];
    for (let node = leaf; !taken.has(node); node = step.nodes[node].parent) path.unshift(step.nodes[node]);
    return path;
  });
}

function stepWords(step) {
  const drafts = step.nodes.length - 1;
  const what = drafts ? `${step.accepted.length} of ${drafts} drafts accepted` : "no drafts";
  return `${what}, ${step.tokens.length} ${step.tokens.length === 1 ? "token" : "tokens"} from one pass`;
}

function depthCounts(steps) { // [{tried, accepted}], depth 1 first: steps with a draft at that depth, and those in which one was accepted
  const counts = [];
  for (const step of steps) {
    const depths = [0];
    for (const node of step.nodes.slice(1)) depths.push(depths[node.parent] + 1);
    for (let depth = 1; depth <= Math.max(...depths); depth++) {
      const count = (counts[depth - 1] ??= { tried: 0, accepted: 0 });
      count.tried += 1;
      count.accepted += step.accepted.length >= depth;
    }
  }
  return counts;
}

// -- the tree --------------------------------------------------------------------------------------------------

function layout(step) { // -> depth and row of every node; the token that the model itself chose is a node below the last accepted one
  const nodes = step.nodes.map((node) => ({ ...node, children: [] }));
  if (step.tokens.length > step.accepted.length) {
    const last = step.tokens.at(-1);
    nodes.push({ ...last, text: last.name, parent: step.accepted.at(-1) ?? 0, source: "", own: true, children: [] });
  }
  const taken = new Set([0, ...step.accepted]);
  nodes.forEach((node, i) => { node.taken = taken.has(i) || Boolean(node.own); });
  nodes.forEach((node, i) => { if (i) nodes[node.parent].children.push(node); });
  let rows = 0;
  const place = (node, depth) => {
    node.depth = depth;
    const ordered = [...node.children].sort((a, b) => b.taken - a.taken);
    node.row = ordered.length ? null : rows++;
    ordered.forEach((child) => place(child, depth + 1));
    node.row ??= ordered[0].row;
  };
  place(nodes[0], 0);
  return { nodes, rows, columns: Math.max(...nodes.map((node) => node.depth)) + 1 };
}

function nodeShape(node, colour) {
  const kind = node.taken ? "taken" : "rejected";
  const group = draw("g", { class: `node ${kind} ${node.own ? "own" : ""} ${colour(node.source)}` });
  const [x, y] = [node.depth * CELL_W + 4, node.row * CELL_H + 4];
  const text = draw("text", { x: x + 8, y: y + 17 });
  text.textContent = short(visible(node.text));
  const title = draw("title");
  const who = node.own ? "the model's own" : node.source ? `drafted by ${node.source}, ${kind}` : "root";
  title.textContent = `${visible(node.text)} (token ${node.id}): ${who}`;
  group.append(title, draw("rect", { x, y, width: CELL_W - 26, height: CELL_H - 9, rx: 5 }), text);
  return group;
}

function edgeShape(parent, node) {
  const [x0, y0] = [parent.depth * CELL_W + CELL_W - 22, parent.row * CELL_H + 16];
  const [x1, y1] = [node.depth * CELL_W + 4, node.row * CELL_H + 16];
  const middle = (x0 + x1) / 2;
  const d = `M${x0} ${y0}C${middle} ${y0} ${middle} ${y1} ${x1} ${y1}`;
  return draw("path", { class: node.taken ? "taken" : "", d });
}

function treePicture(step, label, colour) { // `colour(source)`: the CSS class for a drafter's tokens
  const { nodes, rows, columns } = layout(step);
  const [width, height] = [columns * CELL_W, rows * CELL_H + 8];
  const picture = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  nodes.slice(1).forEach((node) => picture.append(edgeShape(nodes[node.parent], node)));
  nodes.forEach((node) => picture.append(nodeShape(node, colour)));
  return picture;
}
