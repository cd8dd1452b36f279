// The page: conversations, and answers as they come, as text (chat) or token by token (steps).
// Text of the model and of the user becomes text nodes and plain elements, never markup.
import { newChat, recall, remember, removeChat, saveChat, savedChat, savedChats, titleOf } from "./chats.js";
import { $, make } from "./dom.js";
import { addTokens, clearFigures, connectFigures, showFigures, showLastStep, showSteps } from "./figures.js";
import { showMarkdown } from "./markdown.js";
import { Run } from "./run.js";
import { events, modelNames } from "./stream.js";

const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];
const SETTINGS = ["system", "speculation", ...NUMBERS]; // elements whose values belong to a conversation
const USUAL = { speculation: "auto", max_tokens: "512" };
const NEAR = 80; // pixels from the end within which the view follows a growing answer
const TAB = "sessionStorage";
const NO_ROOM = "The browser has no room for this conversation: delete others, or it is gone when the page is closed.";

const state = { chat: newChat(recall("settings", USUAL)), stopper: null, next: null }; // next: the conversation to open then
const items = new WeakMap(); // message -> its element

function fail(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

// -- messages --------------------------------------------------------------------------------------------------

function button(text, label, act) {
  const element = make("button", { type: "button", "aria-label": label }, text);
  element.addEventListener("click", act);
  return element;
}

function userItem(message) {
  const text = make("div", { class: "said" }, message.content);
  const actions = make("div", { class: "actions" },
    button("Edit", "Edit this message and ask again", () => edit(message)), copyButton(() => message.content));
  return make("li", { class: "user" }, make("h3", { class: "unseen" }, "You"), text, actions);
}

function answerItem(message) {
  const answers = make("div", { class: "answers" });
  const again = button("Regenerate", "Write this answer again", () => regenerate(message));
  const actions = make("div", { class: "actions" }, copyButton(() => message.content), again, make("span", { class: "note" }, message.note ?? ""));
  const item = make("li", { class: "assistant" }, make("h3", { class: "unseen" }, "Answer"), answers, actions);
  if (message.content || message.thought) showParts(addAnswer(item), message.thought ?? "", message.content);
  return item;
}

function addAnswer(item, run = null) { // a place for a run; for one that was saved, without its steps
  const parts = { md: make("div", { class: "md" }), tokens: make("div", { class: "tokens", "aria-label": `Tokens, ${run?.name}` }) };
  parts.thought = make("details", { class: "thought", hidden: "" }, make("summary", {}, "Thinking"), make("div", { class: "md" }));
  const box = make("div", { class: run ? "answer traced" : "answer" }, parts.thought, parts.md);
  if (run) box.append(make("h4", {}, run.name), parts.tokens);
  else box.append(make("p", { class: "hint untraced" }, "Steps are not saved: regenerate the answer to see them."));
  item.querySelector(".answers").append(box);
  return parts;
}

function showParts({ thought: box, md }, thought, answer) { // the thinking stays open until the answer begins
  if (thought && box.hidden) box.open = !answer;
  else if (answer && !md.firstChild) box.open = false;
  box.hidden = !thought;
  showMarkdown(box.lastChild, thought);
  showMarkdown(md, answer);
}

function itemOf(message) {
  if (!items.has(message)) items.set(message, message.role === "user" ? userItem(message) : answerItem(message));
  return items.get(message);
}

function showChat() {
  $("messages").replaceChildren(...state.chat.messages.map(itemOf));
  $("welcome").hidden = state.chat.messages.length > 0;
  showList();
}

function nearEnd() {
  const box = $("scroll");
  return box.scrollHeight - box.scrollTop - box.clientHeight < NEAR;
}

const toEnd = () => { $("scroll").scrollTop = $("scroll").scrollHeight; };

async function copy(text, from) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else { // pages without https, other than localhost
    const field = make("textarea", { readonly: "" }, text);
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  from.textContent = "Copied";
  setTimeout(() => { from.textContent = "Copy"; }, 1500);
}

function copyButton(text) {
  const element = button("Copy", "Copy this text", () => copy(text(), element));
  return element;
}

// -- asking ----------------------------------------------------------------------------------------------------

function request(messages) {
  const { settings } = state.chat, asked = Object.entries(settings).filter(([name, value]) => NUMBERS.includes(name) && value !== "");
  const given = settings.seed ?? "", random = Math.floor(Math.random() * 2 ** 31); // two runs of one answer share the seed
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  return {
    ...Object.fromEntries(asked.map(([name, value]) => [name, Number(value)])), seed: given === "" || given < 0 ? random : Number(given),
    messages: [...system, ...messages.map(({ role, content }) => ({ role, content }))],
    ...($("served").value ? { model: $("served").value } : {}),
  };
}

function wantedRuns() { // one after the other: two at a time would share passes and slow each other down
  if (state.chat.settings.speculation === "off") return [["plain", "off"]];
  const both = document.body.dataset.view === "steps" && $("compare").checked;
  return [["speculative", "auto"], ...(both ? [["plain", "off"]] : [])];
}

async function follow(run, runs, item, body) { // shows a run as it comes
  const parts = addAnswer(item, run);
  let frame = null;
  const show = () => {
    frame = null;
    const follows = nearEnd();
    showParts(parts, run.thought, run.answer);
    if (run.steps.length) $("live").textContent = run.figures;
    showFigures(runs);
    if (follows) toEnd();
  };
  try {
    for await (const event of events(body, $("key").value.trim(), state.stopper.signal)) {
      run.take(event);
      if (event.step) addTokens(parts.tokens, run, event.step);
      frame ??= requestAnimationFrame(show);
    }
    if (!run.end) throw new Error("The connection broke off before the answer was finished.");
  } finally {
    cancelAnimationFrame(frame);
    show();
  }
}

// Answer these messages. If nothing comes, or the answer is not finished that was to replace later turns, too,
// the conversation is as before.
async function write(messages, typed = "") {
  if (state.stopper) return;
  const { chat } = state, before = chat.messages, message = { role: "assistant", content: "", note: "" }, runs = [];
  const dropsTurns = before.length > messages.length + 1;
  chat.messages = [...messages, message];
  begin();
  const body = request(messages);
  try {
    for (const [name, speculation] of wantedRuns()) {
      runs.push(new Run(name));
      await follow(runs.at(-1), runs, itemOf(message), { ...body, speculation });
    }
  } catch (error) {
    if (error.name !== "AbortError") fail(error.message);
    if (error.status === 401) openSettings("key");
  }
  if ((runs[0].thought || runs[0].answer) && (runs[0].end || !dropsTurns)) keep(message, runs);
  else {
    chat.messages = before;
    if (before.length && savedChat(chat.id)?.changed === chat.changed) saveChat(chat); // deleting another may have saved half of it
    if (!$("prompt").value.startsWith(typed)) $("prompt").value = [typed, $("prompt").value].filter(Boolean).join("\n\n");
    if (runs[0].end) fail("The model ended its answer without a word.");
  }
  end(runs, message.content);
}

function begin() {
  state.stopper = new AbortController();
  fail("");
  clearFigures();
  showChat();
  toEnd();
  busy(true);
  $("status").textContent = "The model is answering.";
}

function keep(message, runs) {
  const [run] = runs, reason = run.end?.finish_reason ?? (state.stopper.signal.aborted ? "stopped" : "broken off");
  Object.assign(message, { thought: run.thought, content: run.answer });
  message.note = run.figures + ({ length: " · cut off at Max tokens", stop: "" }[reason] ?? ` · ${reason}`);
  itemOf(message).querySelector(".note").textContent = message.note;
  if (!saveChat(state.chat)) fail(NO_ROOM);
}

function end(runs, text) {
  const follows = nearEnd();
  state.stopper = null;
  busy(false);
  showChat();
  showFigures(runs);
  showLastStep();
  $("live").textContent = "";
  $("status").textContent = text; // for screen readers, whole
  if (follows) toEnd();
  if (state.next) openChat(state.next);
}

function send(text) {
  if (!text.trim() || state.stopper) return;
  $("prompt").value = "";
  write([...state.chat.messages, { role: "user", content: text }], text);
}

const upTo = (message) => state.chat.messages.slice(0, state.chat.messages.indexOf(message));

function regenerate(message) {
  write(upTo(message));
}

function edit(message) {
  if (state.stopper) return;
  const field = make("textarea", { rows: "3", "aria-label": "Edit the message" });
  const item = itemOf(message), back = () => item.replaceChildren(...kept), kept = [...item.childNodes];
  const ask = () => {
    if (state.stopper) return;
    if (field.value.trim()) write([...upTo(message), { role: "user", content: field.value }], field.value);
    back();
  };
  field.value = message.content;
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !composes(event)) back();
    if (!isEnter(event)) return;
    event.preventDefault();
    ask();
  });
  item.replaceChildren(field, make("div", { class: "actions" }, button("Ask", "Ask this instead", ask), button("Cancel", "Leave it as it was", back)));
  field.focus();
}

function busy(running) {
  document.body.toggleAttribute("data-busy", running);
  $("send").hidden = running;
  $("stop").hidden = !running;
  $("talk").setAttribute("aria-busy", String(running));
  if (!running && !matchMedia("(pointer: coarse)").matches) $("prompt").focus();
}

// -- conversations ---------------------------------------------------------------------------------------------

function showList() {
  const saved = savedChats(), { chat } = state;
  const chats = chat.messages.length && saved.every((other) => other.id !== chat.id) ? [chat, ...saved] : saved;
  $("list").replaceChildren(...chats.map(listItem));
}

function listItem(chat) {
  const title = titleOf(chat), open = button(title, title, () => (chat.id === state.chat.id ? showMenu(false) : openChat(chat)));
  if (chat.id === state.chat.id) open.setAttribute("aria-current", "true");
  const remove = button("×", `Delete ${title}`, () => {
    if (state.stopper && chat.id === state.chat.id) return;
    if (removeChat(chat.id) && $("error").textContent === NO_ROOM) fail("");
    if (chat.id === state.chat.id) openChat(newChat(state.chat.settings));
    else showList();
  });
  return make("li", {}, open, remove);
}

function openChat(chat) {
  showMenu(false);
  state.next = state.stopper ? chat : null;
  if (state.stopper) return state.stopper.abort();
  state.chat = savedChat(chat.id) ?? chat; // another tab may have gone on with it since the list was drawn
  for (const name of SETTINGS) $(name).value = state.chat.settings?.[name] ?? USUAL[name] ?? "";
  takeSettings();
  clearFigures();
  if ($("error").textContent !== NO_ROOM) fail("");
  showChat();
  toEnd();
  $("prompt").focus();
}

function showMenu(open) {
  document.body.toggleAttribute("data-menu", open);
  $("menu").setAttribute("aria-expanded", String(open));
}

// -- settings --------------------------------------------------------------------------------------------------

function takeSettings() {
  state.chat.settings = Object.fromEntries(SETTINGS.map((name) => [name, $(name).value]));
}

function openSettings(field = "system") {
  if (!$("dialog").open) $("dialog").showModal();
  $(field).focus();
}

function closeSettings() {
  const { chat } = state, before = JSON.stringify(chat.settings);
  takeSettings();
  remember("settings", chat.settings);
  const isChanged = JSON.stringify(chat.settings) !== before;
  const isOurs = savedChat(chat.id)?.changed === chat.changed; // not deleted, nor gone on with, in another tab
  if (isChanged && isOurs && !state.stopper) saveChat(chat);
}

function showView(view) {
  document.body.dataset.view = view;
  for (const name of ["chat", "steps"]) $(`${name}view`).setAttribute("aria-pressed", String(name === view));
  remember("view", view);
  if (view === "steps") showSteps();
}

function showTheme() {
  document.documentElement.dataset.theme = $("theme").value;
  remember("theme", $("theme").value);
}

async function greet() {
  try {
    const names = await modelNames($("key").value.trim());
    $("served").replaceChildren(...names.map((name) => make("option", {}, name)));
    $("model").textContent = names[0];
    fail("");
  } catch (error) {
    fail(error.message);
    if (error.status === 401) openSettings("key");
  }
}

// -- keys and pointers -----------------------------------------------------------------------------------------

const composes = (event) => event.isComposing || event.keyCode === 229; // Safari ends a composition before its Enter
const isEnter = (event) => event.key === "Enter" && !event.shiftKey && !composes(event);

function connectTalk() {
  $("form").addEventListener("submit", (event) => { event.preventDefault(); send($("prompt").value); });
  $("prompt").addEventListener("keydown", (event) => {
    if (!isEnter(event)) return;
    event.preventDefault();
    $("form").requestSubmit();
  });
  $("stop").addEventListener("click", () => state.stopper?.abort());
  $("messages").addEventListener("click", (event) => {
    const from = event.target.closest(".copy-code");
    if (from) copy(from.closest(".code").querySelector("code").textContent, from);
  });
  for (const example of document.querySelectorAll(".example")) {
    example.addEventListener("click", () => send(example.querySelector("span").textContent));
  }
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || composes(event) || $("dialog").open) return;
    state.stopper?.abort();
    showMenu(false);
  });
}

function connectPage() {
  $("menu").addEventListener("click", () => showMenu(!document.body.hasAttribute("data-menu")));
  $("fresh").addEventListener("click", () => openChat(newChat(state.chat.settings)));
  $("chatview").addEventListener("click", () => showView("chat"));
  $("stepsview").addEventListener("click", () => showView("steps"));
  $("settings").addEventListener("click", () => openSettings());
  $("options").addEventListener("submit", (event) => { event.preventDefault(); $("dialog").close(); });
  $("dialog").addEventListener("close", closeSettings);
  $("served").addEventListener("change", () => { $("model").textContent = $("served").value; });
  $("theme").addEventListener("change", showTheme);
  $("key").addEventListener("change", () => { remember("key", $("key").value, TAB); greet(); });
}

connectTalk();
connectPage();
connectFigures();
$("theme").value = recall("theme", "");
$("key").value = recall("key", "", TAB);
showTheme();
showView(recall("view", "chat"));
openChat(state.chat);
greet();
