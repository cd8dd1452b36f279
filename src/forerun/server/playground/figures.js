// The view of the steps: who drafted each token, the draft tree of a step, charts and figures over an answer.
import { $, make, number } from "./dom.js";
import { depthCounts, rejectedBranches, stepWords, tokensChart, treePicture, visible } from "./trees.js";

const NUM_COLOURS = 8, REPLAY_MS = 700;
const colours = new Map(); // drafter -> CSS class
const GROWTH = 1.02; // times as many steps at which a chart is drawn again: so the work grows with an answer's length, not with its square
const state = {
  runs: [], ended: true, run: null, step: 0, player: null, charted: null, drawn: 0, // drawn: steps of the chart
  boxes: new WeakMap(), // run -> the element with its tokens
};

// -- tokens ----------------------------------------------------------------------------------------------------

function colour(source) {
  if (!source) return "";
  if (!colours.has(source)) {
    const name = `s${colours.size % NUM_COLOURS}`;
    colours.set(source, name);
    $("legend").append(make("li", {}, make("span", { class: `tok ${name}` }, "text"), ` drafted by ${source}`));
  }
  return colours.get(source);
}

export function addTokens(box, run, step) { // the tokens of a new step
  state.boxes.set(run, box);
  const index = run.steps.length - 1;
  for (const token of step.tokens) box.append(tokenSpan(run, index, token, !box.firstChild));
}

function tokenSpan(run, index, token, first) {
  const step = run.steps[index], wasted = step.nodes.length - 1 > step.accepted.length;
  const names = ["tok", colour(token.source), wasted ? "wasted" : "", token.text ? "" : "special"];
  const span = make("span", { class: names.filter(Boolean).join(" "), tabindex: first ? "0" : "-1", role: "button" });
  span.append(token.text || token.name);
  const who = token.source ? `drafted by ${token.source}` : "the model itself";
  span.setAttribute("aria-label", `${visible(token.text || token.name)}, ${who}, step ${index + 1}`);
  return Object.assign(span, { run, index, token });
}

function showTip(span) { // which drafts were rejected in a token's step
  const { run, index, token } = span, step = run.steps[index];
  const who = token.source ? `drafted by ${token.source}, accepted` : "chosen by the model itself";
  const lines = [make("div", {}, `Step ${index + 1}: “${visible(token.text || token.name)}” ${who}`)];
  for (const branch of rejectedBranches(step)) {
    const text = branch.map((node) => visible(node.text)).join(" ");
    lines.push(make("div", {}, make("del", {}, text), ` ${branch[0].source}, rejected`));
  }
  $("tip").replaceChildren(...lines);
  $("tip").hidden = false;
  const box = span.getBoundingClientRect(), tip = $("tip").getBoundingClientRect();
  const below = box.bottom + 6 + tip.height < innerHeight;
  $("tip").style.top = `${below ? box.bottom + 6 : Math.max(0, box.top - tip.height - 6)}px`;
  $("tip").style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.width - 4))}px`;
}

const isShown = () => document.body.dataset.view === "steps";
const hideTip = () => { $("tip").hidden = true; };

// -- one step --------------------------------------------------------------------------------------------------

function goTo(run, index) {
  const other = run !== state.run;
  state.run = run;
  state.step = Math.max(0, Math.min(index, run.steps.length - 1));
  if (other) showOver(run);
  showTree();
}

function showTree() {
  const { run, step: index } = state, step = run.steps[index];
  $("tree").replaceChildren(treePicture(step, `Tree of step ${index + 1}: ${stepWords(step)}`, colour));
  $("stepinfo").textContent = `Step ${index + 1} of ${run.steps.length} (${run.name}): ${stepWords(step)}`;
  $("step").max = run.steps.length;
  $("step").value = index + 1;
  $("step").disabled = $("play").disabled = false;
  $("previous").disabled = index === 0;
  $("next").disabled = index === run.steps.length - 1;
  document.querySelectorAll(".here").forEach((element) => element.classList.remove("here"));
  state.boxes.get(run).querySelectorAll(".tok").forEach((span) => span.classList.toggle("here", span.index === index));
  $("chart").querySelectorAll(".bar").forEach((bar) => bar.classList.toggle("here", bar.index === index));
}

function stopReplay() {
  clearInterval(state.player);
  state.player = null;
  $("play").textContent = "Replay";
}

function replay() {
  if (state.player !== null) return stopReplay();
  if (state.step >= state.run.steps.length - 1) goTo(state.run, 0);
  $("play").textContent = "Pause";
  state.player = setInterval(() => {
    if (state.step >= state.run.steps.length - 1) stopReplay();
    else goTo(state.run, state.step + 1);
  }, REPLAY_MS);
}

// -- figures over answers --------------------------------------------------------------------------------------

export function showFigures(runs = state.runs) { // the last answer's runs: with speculation and, if asked for, without
  state.runs = runs;
  if (!isShown()) return;
  const begun = runs.filter((run) => run.steps.length);
  $("speed").tBodies[0].replaceChildren(...begun.map(speedRow));
  if (begun.length && (begun[0] !== state.charted || begun[0].steps.length >= GROWTH * state.drawn)) showOver(begun[0]);
  showVerdict(runs);
}

function speedRow(run) {
  const gain = run.drafted && run.speedup ? `, ${number(run.speedup, 2)}x plain (estimated)` : "";
  const drafts = run.drafted ? `${run.accepted} of ${run.drafted} drafts` : "no drafts";
  const cells = [number(run.rate) + gain, number(run.ids.length / run.steps.length, 2), drafts];
  return make("tr", {}, make("th", { scope: "row" }, run.name), ...cells.map((cell) => make("td", {}, cell)));
}

function showOver(run) {
  Object.assign(state, { charted: run, drawn: run.steps.length });
  const most = Math.max(...run.steps.map((step) => step.tokens.length)), mean = number(run.ids.length / run.steps.length, 2);
  const words = `Tokens of each of ${run.steps.length} passes: ${mean} on average, ${most} at most`;
  const atEnd = $("chart").scrollLeft + $("chart").clientWidth >= $("chart").scrollWidth - 2;
  $("chart").replaceChildren(tokensChart(run.steps, words, colour));
  if (atEnd) $("chart").scrollLeft = $("chart").scrollWidth;
  const rows = depthCounts(run.steps).map(({ tried, accepted }, i) => {
    const share = accepted / tried;
    const bar = make("meter", { min: 0, max: 1, value: share, "aria-hidden": "true" });
    const words = ` ${Math.round(100 * share)} % (${accepted} of ${tried})`;
    return make("tr", {}, make("th", { scope: "row" }, String(i + 1)), make("td", {}, bar, words));
  });
  $("depths").tBodies[0].replaceChildren(...rows);
}

function showVerdict([on, plain]) {
  $("verdict").textContent = "";
  if (!plain?.end || !on.end) return;
  const same = on.ids.length === plain.ids.length && on.ids.every((id, i) => id === plain.ids[i]);
  const other = on.sameTokens ? "The tokens DIFFER, which must not happen: please report it"
    : "Another sample, since this server verifies by rejection: the probabilities are the same, the tokens need not be";
  const words = same ? "The same tokens, one by one" : other;
  const speed = `${number(on.rate / plain.rate, 2)}x the speed of plain decoding`;
  $("verdict").textContent = `${words}; ${speed}, measured one after the other.`;
}

export function showLastStep() { // once an answer has ended
  const [run] = state.runs;
  state.ended = true;
  if (!isShown() || !run?.steps.length) return;
  state.run = run;
  showOver(run);
  goTo(run, run.steps.length - 1);
}

export function showSteps() { // when the view was switched to
  showFigures();
  if (state.run) {
    showOver(state.run);
    showTree();
  } else if (state.ended) showLastStep();
}

export function clearFigures() {
  stopReplay();
  hideTip();
  Object.assign(state, { runs: [], ended: false, run: null, step: 0, charted: null, drawn: 0 });
  for (const id of ["tree", "chart"]) $(id).replaceChildren();
  for (const id of ["speed", "depths"]) $(id).tBodies[0].replaceChildren();
  for (const id of ["previous", "next", "play", "step"]) $(id).disabled = true;
  $("verdict").textContent = "";
  $("stepinfo").textContent = "No step yet.";
}

// -- keys and pointers -----------------------------------------------------------------------------------------

function moveFocus(span, key) {
  const all = [...state.boxes.get(span.run).querySelectorAll(".tok")], here = all.indexOf(span);
  const places = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: all.length - 1 };
  const target = all[places[key]];
  if (!target) return;
  span.tabIndex = -1;
  target.tabIndex = 0;
  target.focus();
}

function onTokenKey(event) {
  const span = event.target.closest(".tok");
  if (!span?.run) return;
  if (event.key === "Escape") return hideTip();
  if (["Enter", " "].includes(event.key)) goTo(span.run, span.index);
  else if (["ArrowRight", "ArrowLeft", "Home", "End"].includes(event.key)) moveFocus(span, event.key);
  else return;
  event.preventDefault();
}

const onToken = (act) => (event) => {
  const span = event.target.closest(".tok");
  if (span?.run) act(span);
};

export function connectFigures() {
  const messages = $("messages");
  for (const kind of ["mouseover", "focusin"]) messages.addEventListener(kind, onToken(showTip));
  for (const kind of ["mouseout", "focusout"]) messages.addEventListener(kind, hideTip);
  messages.addEventListener("click", onToken((span) => { goTo(span.run, span.index); showTip(span); }));
  messages.addEventListener("keydown", onTokenKey);
  $("chart").addEventListener("click", (event) => {
    const bar = event.target.closest(".bar");
    if (bar) goTo(state.charted, bar.index);
  });
  $("previous").addEventListener("click", () => goTo(state.run, state.step - 1));
  $("next").addEventListener("click", () => goTo(state.run, state.step + 1));
  $("play").addEventListener("click", replay);
  $("step").addEventListener("input", () => goTo(state.run, Number($("step").value) - 1));
}
