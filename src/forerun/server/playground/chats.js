// Conversations in the browser's storage, one entry each, so that two tabs do not overwrite each other's.
// A conversation is {id, changed, settings, messages: [{role, content, thought, note}]}.

const PREFIX = "forerun.chat.";
const TITLE = 60; // letters

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

export function newChat(settings) {
  return { id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, changed: 0, settings: { ...settings }, messages: [] };
}

export function savedChats() { // the last changed first
  let keys = [];
  try {
    keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  } catch { /* storage is forbidden */ }
  return keys.map((key) => savedChat(key.slice(PREFIX.length))).filter(Boolean).sort((a, b) => b.changed - a.changed);
}

export function savedChat(id) { // as it is now; null if there is none, or something else under its name
  const chat = recall(`chat.${id}`, null), { messages } = chat ?? {};
  return Array.isArray(messages) && messages.every((message) => typeof message?.content === "string") ? chat : null;
}

export function saveChat(chat) { // -> whether the browser had room
  chat.changed = Date.now();
  return remember(`chat.${chat.id}`, chat);
}

export function removeChat(id) {
  try {
    localStorage.removeItem(PREFIX + id);
  } catch { /* storage is forbidden */ }
}

export function titleOf(chat) {
  const first = chat.messages.find((message) => message.role === "user")?.content ?? "New chat";
  const line = first.trim().split("\n")[0];
  return [...line].length > TITLE ? `${[...line].slice(0, TITLE - 1).join("")}…` : line;
}
