// Pictures of steps as SVG: the draft tree of one, the tokens of all; and what is counted over steps. Does not use the page.
// A step is what the server sends: {nodes: [{id, text, parent, source}], accepted: [node], tokens: [{id, text, name, source}], time_s}.
import { draw } from "./dom.js";

const CELL_W = 118, CELL_H = 34;
const BAR_W = 9, UNIT_H = 14; // of the chart: a step, a token

export const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
const short = (text) => ([...text].length > 10 ? [...text].slice(0, 9).join("") + "…" : text);

// -- accepted and rejected drafts ---------------------------------------------------------------------------------

export function rejectedBranches(step) { // a path of nodes for each rejected leaf, from below the last accepted node on it
  const taken = new Set([0, ...step.accepted]);
  const parents = new Set(step.nodes.map((node) => node.parent));
  const leaves = step.nodes.map((_, node) => node).filter((node) => !parents.has(node) && !taken.has(node));
  return leaves.map((leaf) => {
    const path = [];
    for (let node = leaf; !taken.has(node); node = step.nodes[node].parent) path.unshift(step.nodes[node]);
    return path;
  });
}

export function stepWords(step) {
  const drafts = step.nodes.length - 1;
  const what = drafts ? `${step.accepted.length} of ${drafts} drafts accepted` : "no drafts";
  return `${what}, ${step.tokens.length} ${step.tokens.length === 1 ? "token" : "tokens"} from one pass`;
}

export function depthCounts(steps) { // [{tried, accepted}], depth 1 first: steps with a draft at that depth, and those in which one was accepted
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

export function treePicture(step, label, colour) { // `colour(source)`: the CSS class for a drafter's tokens
  const { nodes, rows, columns } = layout(step);
  const [width, height] = [columns * CELL_W, rows * CELL_H + 8];
  const picture = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  nodes.slice(1).forEach((node) => picture.append(edgeShape(nodes[node.parent], node)));
  nodes.forEach((node) => picture.append(nodeShape(node, colour)));
  return picture;
}

// -- the chart -------------------------------------------------------------------------------------------------

export function tokensChart(steps, label, colour) { // a bar a step, a box a token, the first at the bottom
  const most = Math.max(...steps.map((step) => step.tokens.length));
  const [width, height] = [steps.length * BAR_W + 22, most * UNIT_H + 1];
  const picture = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const count of new Set([1, most])) {
    const text = draw("text", { x: 16, y: height - (count - 0.5) * UNIT_H + 3, "text-anchor": "end" });
    text.textContent = String(count);
    picture.append(text);
  }
  steps.forEach((step, index) => picture.append(Object.assign(bar(step, index, height, colour), { index })));
  return picture;
}

function bar(step, index, height, colour) {
  const title = draw("title");
  title.textContent = `Step ${index + 1}: ${stepWords(step)}`;
  const boxes = step.tokens.map((token, i) => draw("rect", {
    x: 20 + index * BAR_W, y: height - (i + 1) * UNIT_H, width: BAR_W - 2, height: UNIT_H - 1, class: colour(token.source) || "plain",
  }));
  return draw("g", { class: "bar" }, title, ...boxes);
}
