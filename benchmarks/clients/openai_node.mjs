// openai for Node: chat, streams, tools runner, responses, models.
import OpenAI from "openai";
import { check, FOX, KEY, MODEL, V1 } from "./tour.mjs";

const api = new OpenAI({ baseURL: V1, apiKey: KEY, maxRetries: 0 });
const messages = [{ role: "user", content: FOX }];
await check("models", async () => (await api.models.retrieve(MODEL)).id === MODEL);
await check("chat, streams", async () => {
  const stream = api.chat.completions.stream({ model: MODEL, messages, max_tokens: 20, seed: 1 });
  return (await stream.finalContent()) && (await api.chat.completions.create({ model: MODEL, messages, max_tokens: 20 })).choices[0];
});
await check("responses, streams", async () => {
  const kinds = [];
  for await (const event of await api.responses.create({ model: MODEL, input: FOX, max_output_tokens: 20, stream: true })) kinds.push(event.type);
  return kinds[0] === "response.created" && kinds.includes("response.output_text.delta");
});
await check("structured output", async () => {
  const schema = { type: "object", properties: { yes: { type: "boolean" } }, required: ["yes"], additionalProperties: false };
  const made = await api.chat.completions.parse({ model: MODEL, messages, max_tokens: 50, response_format: { type: "json_schema", json_schema: { name: "a", strict: true, schema } } });
  return "yes" in made.choices[0].message.parsed;
});
