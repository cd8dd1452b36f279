// @anthropic-ai/sdk: messages, streams, tools.
import Anthropic from "@anthropic-ai/sdk";
import { BASE, check, FOX, KEY, MODEL } from "./tour.mjs";

const api = new Anthropic({ baseURL: BASE, apiKey: KEY, maxRetries: 0 });
const messages = [{ role: "user", content: FOX }];
await check("messages", async () => (await api.messages.create({ model: MODEL, max_tokens: 20, messages })).content[0].text);
await check("streams", async () => api.messages.stream({ model: MODEL, max_tokens: 20, messages }).finalText());
await check("tools", async () => {
  const input_schema = { type: "object", properties: { yes: { type: "boolean" } }, required: ["yes"], additionalProperties: false };
  const made = await api.messages.create({ model: MODEL, max_tokens: 60, messages, tools: [{ name: "answer", input_schema }], tool_choice: { type: "tool", name: "answer" } });
  return "yes" in made.content.at(-1).input;
});
