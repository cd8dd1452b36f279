// Conversations in the browser's storage, one entry each, so that two tabs do not overwrite each other's.
// A conversation is {id, changed, settings, messages: [{role, content, thought, note}]}.

const PREFIX = "forerun.chat.";
const TITLE = 60; // letters
const unsaved = new Map(); // id -> a conversation that the browser had no room for: it lasts as long as the page

export function recall(name, otherwise, storage = "localStorage") { // the last settings, view and theme; of a tab, its key
  try {
    return JSON.parse(window[storage].getItem(`forerun.${name}`)) ?? otherwise;
  } catch { // storage may be forbidden, or hold something else
    return otherwise;
  }
}

export function remember(name, value, storage = "localStorage") { // -> whether the browser had room
  try {
    window[storage].setItem(`forerun.${name}`, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

const newId = () => `${Date.now()}-${Math.random().toString(36).slice(2)}`;

export function newChat(settings) {
  return { id: newId(), changed: 0, settings: { ...settings }, messages: [] };
}

export function savedChats() { // the last changed first
  let keys = [];
  try {
    keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  } catch { /* storage is forbidden */ }
  const ids = new Set([...unsaved.keys(), ...keys.map((key) => key.slice(PREFIX.length))]);
  return [...ids].map(savedChat).filter(Boolean).sort((a, b) => b.changed - a.changed);
}

export function savedChat(id) { // as it is now; null if there is none, or something else under its name
  const chat = unsaved.get(id) ?? recall(`chat.${id}`, null), { messages } = chat ?? {};
  return Array.isArray(messages) && messages.every((message) => typeof message?.content === "string") ? chat : null;
}

export function saveChat(chat) { // -> whether the browser had room
  const there = recall(`chat.${chat.id}`, null), changed = Date.now();
  if (there && there.changed !== chat.changed) { // another tab went on with it: both are kept
    unsaved.delete(chat.id);
    chat.id = newId();
  }
  const hasRoom = remember(`chat.${chat.id}`, { ...chat, changed });
  if (hasRoom) chat.changed = changed;
  if (hasRoom) unsaved.delete(chat.id);
  else unsaved.set(chat.id, chat);
  return hasRoom;
}

export function removeChat(id) { // -> whether all others are saved now
  unsaved.delete(id);
  try {
    localStorage.removeItem(PREFIX + id);
  } catch { /* storage is forbidden */ }
  return [...unsaved.values()].every(saveChat);
}

export function titleOf(chat) {
  const first = chat.messages.find((message) => message.role === "user")?.content ?? "New chat";
  const line = first.trim().split("\n")[0];
  return [...line].length > TITLE ? `${[...line].slice(0, TITLE - 1).join("")}…` : line;
}
