// The playground: sends a conversation to /playground/stream and shows each step of the answer.
// Text of the model and of the user is inserted as text nodes, never as markup.
"use strict";

const $ = (id) => document.getElementById(id);
const NUM_COLOURS = 8, REPLAY_MS = 700;
const state = { history: [], runs: [], colours: new Map(), run: null, step: 0, stopper: null, player: null };

// -- colours and errors ----------------------------------------------------------------------------------------

function colour(source) {
  if (!source) return "";
  if (!state.colours.has(source)) {
    const name = `s${state.colours.size % NUM_COLOURS}`;
    state.colours.set(source, name);
    $("legend").append(make("li", {}, make("span", { class: `tok ${name}` }, "text"), ` drafted by ${source}`));
  }
  return state.colours.get(source);
}

function fail(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

// -- the stream ------------------------------------------------------------------------------------------------

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function refusal(answer) {
  if (answer.status === 401) $("keyfield").hidden = false;
  const body = await answer.json().catch(() => null);
  return new Error(body?.error?.message ?? `the server answered ${answer.status}`);
}

async function* events(body, signal) {
  const options = { method: "POST", headers: headers(), body: JSON.stringify(body), signal };
  const answer = await fetch("/playground/stream", options);
  if (!answer.ok) throw await refusal(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (held + part.value).split("\n\n");
    held = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

// -- one run ---------------------------------------------------------------------------------------------------

class Run {
  constructor(name, parent) {
    Object.assign(this, { name, steps: [], ids: [], text: "", speedup: null, end: null });
    this.box = make("div", { class: "text", "aria-label": `Answer, ${name}` });
    parent.append(make("div", { class: "answer" }, make("h3", {}, name), this.box));
    this.cells = [0, 1, 2].map(() => make("td", {}, "–"));
    $("speed").tBodies[0].append(make("tr", {}, make("th", { scope: "row" }, name), ...this.cells));
  }

  take(event) {
    if (event.error) throw new Error(event.error.message);
    if (event.start) $("model").textContent = `${event.start.model}, drafter ${event.start.drafter}`;
    if (event.step) this.add(event.step, event.speedup);
    if (event.end) this.finish(event.end);
  }

  add(step, speedup) {
    const index = this.steps.push(step) - 1;
    this.speedup = speedup ?? this.speedup;
    for (const token of step.tokens) {
      this.ids.push(token.id);
      this.text += token.text;
      this.box.append(tokenSpan(this, index, token));
    }
    this.show();
  }

  finish(end) {
    this.end = end;
    this.text += end.rest;
    this.box.append(end.rest);
    this.show();
  }

  get rate() { // tokens per second, without the first step, which reads the prompt
    const [first, last] = [this.steps[0], this.steps.at(-1)];
    return (this.ids.length - first.tokens.length) / (last.time_s - first.time_s);
  }

  show() {
    const drafted = this.steps.reduce((sum, step) => sum + step.nodes.length - 1, 0);
    const accepted = this.steps.reduce((sum, step) => sum + step.accepted.length, 0);
    const gain = this.speedup ? `, ${number(this.speedup, 2)}x plain (estimated)` : "";
    this.cells[0].textContent = number(this.rate) + (drafted ? gain : "");
    this.cells[1].textContent = number(this.ids.length / this.steps.length, 2);
    this.cells[2].textContent = drafted ? `${accepted} of ${drafted} drafts` : "no drafts";
  }
}

function tokenSpan(run, index, token) {
  const wasted = run.steps[index].nodes.length - 1 > run.steps[index].accepted.length;
  const names = ["tok", colour(token.source), wasted ? "wasted" : "", token.text ? "" : "special"];
  const first = run.box.querySelector(".tok") === null;
  const span = make("span", { class: names.filter(Boolean).join(" "), tabindex: first ? "0" : "-1", role: "button" });
  span.append(token.text || token.name);
  const who = token.source ? `drafted by ${token.source}` : "the model itself";
  span.setAttribute("aria-label", `${visible(token.text || token.name)}, ${who}, step ${index + 1}`);
  Object.assign(span, { run, index, token });
  return span;
}

// -- the tooltip: rejected drafts of a token's step -----------------------------------------------------------------------------------------

function showTip(span) {
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

const hideTip = () => { $("tip").hidden = true; };

// -- the tree of a step ----------------------------------------------------------------------------------------

function showTree() {
  const { run, step: index } = state, step = run.steps[index];
  $("tree").replaceChildren(treePicture(step, `Tree of step ${index + 1}: ${stepWords(step)}`, colour));
  $("stepinfo").textContent = `Step ${index + 1} of ${run.steps.length} (${run.name}): ${stepWords(step)}`;
  $("step").max = run.steps.length;
  $("step").value = index + 1;
  $("step").disabled = $("play").disabled = false;
  $("previous").disabled = index === 0;
  $("next").disabled = index === run.steps.length - 1;
  document.querySelectorAll(".here").forEach((span) => span.classList.remove("here"));
  run.box.querySelectorAll(".tok").forEach((span) => span.classList.toggle("here", span.index === index));
}

function goTo(run, index) {
  state.run = run;
  state.step = Math.max(0, Math.min(index, run.steps.length - 1));
  showTree();
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

// -- figures over a run ----------------------------------------------------------------------------------------

function showDepths(run) {
  const rows = depthCounts(run.steps).map(({ tried, accepted }, i) => {
    const share = accepted / tried;
    const bar = make("meter", { min: 0, max: 1, value: share, "aria-hidden": "true" });
    const words = ` ${Math.round(100 * share)} % (${accepted} of ${tried})`;
    return make("tr", {}, make("th", { scope: "row" }, String(i + 1)), make("td", {}, bar, words));
  });
  $("depths").tBodies[0].replaceChildren(...rows);
}

function showVerdict(runs) {
  const [on, plain] = runs;
  if (!plain?.end || !on.end) return;
  const same = on.ids.length === plain.ids.length && on.ids.every((id, i) => id === plain.ids[i]);
  const words = same ? "The same tokens, one by one" : "The tokens DIFFER, which must not happen: please report it";
  const speed = `${number(on.rate / plain.rate, 2)}x the speed of plain decoding`;
  $("verdict").textContent = `${words}; ${speed}, measured one after the other.`;
}

// -- a turn of the conversation --------------------------------------------------------------------------------

function request(speculation, seed) {
  const whole = (id, other) => ($(id).value === "" ? other : Number($(id).value));
  const limits = { temperature: whole("temperature", 0), max_tokens: whole("max", 200) };
  return { messages: state.history, speculation, seed, ...limits };
}

async function generate(run, body) {
  for await (const event of events(body, state.stopper.signal)) {
    run.take(event);
    if (event.step) showDepths(state.runs[0]);
  }
}

function startTurn(text) {
  const answers = make("div", { class: "answers" });
  $("messages").append(make("li", { class: "user" }, text), make("li", {}, answers));
  state.history.push({ role: "user", content: text });
  state.runs = [];
  stopReplay();
  $("speed").tBodies[0].replaceChildren();
  $("depths").tBodies[0].replaceChildren();
  $("verdict").textContent = "";
  return answers;
}

async function answer(text) {
  const box = startTurn(text), mode = $("mode").value;
  const seed = $("seed").value === "" ? Math.floor(Math.random() * 2 ** 31) : Number($("seed").value);
  const kinds = mode === "both" ? ["auto", "off"] : [mode]; // one after the other: two at a time would share passes and slow each other down
  const bodies = kinds.map((kind) => request(kind, seed));
  for (const [i, kind] of kinds.entries()) {
    const run = new Run(kind === "off" ? "plain" : "speculative", box);
    state.runs.push(run);
    await generate(run, bodies[i]);
  }
  showVerdict(state.runs);
}

async function send() {
  const text = $("prompt").value;
  if (!text.trim() || state.stopper) return;
  state.stopper = new AbortController();
  busy(true);
  fail("");
  $("prompt").value = "";
  try {
    await answer(text);
  } catch (error) {
    if (error.name !== "AbortError") fail(error.message);
  }
  const [run] = state.runs;
  if (run?.text) state.history.push({ role: "assistant", content: run.text });
  else { // there is no answer: the question leaves the conversation and goes back into the message field
    state.history.pop();
    $("prompt").value ||= text;
  }
  if (run?.steps.length) goTo(run, run.steps.length - 1);
  state.stopper = null;
  busy(false);
}

function busy(running) {
  $("send").disabled = $("clear").disabled = running;
  $("stop").disabled = !running;
  $("talk").setAttribute("aria-busy", String(running));
}

function clearChat() {
  stopReplay();
  Object.assign(state, { history: [], runs: [], run: null, step: 0 });
  for (const id of ["messages", "tree"]) $(id).replaceChildren();
  for (const id of ["speed", "depths"]) $(id).tBodies[0].replaceChildren();
  for (const id of ["previous", "next", "play", "step"]) $(id).disabled = true;
  $("verdict").textContent = "";
  $("stepinfo").textContent = "No step yet.";
  fail("");
  hideTip();
  $("prompt").focus();
}

// -- keys, pointers, theme -------------------------------------------------------------------------------------

function moveFocus(span, key) {
  const all = [...span.run.box.querySelectorAll(".tok")], here = all.indexOf(span);
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

function switchTheme() {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = root.dataset.theme ?? (dark ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
}

function connect() {
  const messages = $("messages");
  for (const kind of ["mouseover", "focusin"]) messages.addEventListener(kind, onToken(showTip));
  for (const kind of ["mouseout", "focusout"]) messages.addEventListener(kind, hideTip);
  messages.addEventListener("click", onToken((span) => { goTo(span.run, span.index); showTip(span); }));
  messages.addEventListener("keydown", onTokenKey);
  $("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("form").requestSubmit();
  });
  $("stop").addEventListener("click", () => state.stopper?.abort());
  $("clear").addEventListener("click", clearChat);
  $("previous").addEventListener("click", () => goTo(state.run, state.step - 1));
  $("next").addEventListener("click", () => goTo(state.run, state.step + 1));
  $("play").addEventListener("click", replay);
  $("step").addEventListener("input", () => goTo(state.run, Number($("step").value) - 1));
  $("theme").addEventListener("click", switchTheme);
  $("key").addEventListener("change", greet);
}

async function greet() {
  try {
    const answer = await fetch("/v1/models", { headers: headers() });
    if (!answer.ok) throw await refusal(answer);
    $("model").textContent = (await answer.json()).data[0].id;
    fail("");
  } catch (error) {
    fail(error.message);
  }
}

connect();
greet();
