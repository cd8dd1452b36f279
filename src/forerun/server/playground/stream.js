// What the pages ask the server. Does not know the pages.

const BASE = new URL("../", import.meta.url); // a proxy may serve all of this under a prefix

export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function asked(path, key, options = {}) {
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(new URL(path, BASE), { ...options, headers });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  throw new Refusal(answer.status, body?.error?.message ?? `the server answered ${answer.status}`);
}

export async function modelNames(key) {
  const answer = await asked("v1/models", key);
  return (await answer.json()).data.map((model) => model.id);
}

export async function apiDocument(key) {
  return (await asked("openapi.json", key)).json();
}

export async function* events(body, key, signal) {
  const answer = await asked("playground/stream", key, { method: "POST", body: JSON.stringify(body), signal });
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
