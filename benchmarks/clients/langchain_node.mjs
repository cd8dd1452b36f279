// LangChain for Node: chat completions and the Responses API.
import { ChatOpenAI } from "@langchain/openai";
import { check, FOX, KEY, MODEL, V1 } from "./tour.mjs";

for (const useResponsesApi of [false, true]) {
  const llm = new ChatOpenAI({ model: MODEL, apiKey: KEY, maxTokens: 60, maxRetries: 0, temperature: 0, useResponsesApi, configuration: { baseURL: V1 } });
  await check(useResponsesApi ? "Responses API" : "chat completions", async () => {
    let pieces = 0;
    for await (const _ of await llm.stream(FOX)) pieces += 1;
    const schema = { title: "answer", type: "object", properties: { yes: { type: "boolean" } }, required: ["yes"], additionalProperties: false };
    const made = await llm.withStructuredOutput(schema, { method: "jsonSchema" }).invoke("Yes?");
    return pieces > 2 && (await llm.invoke(FOX)).content && "yes" in made;
  });
}
