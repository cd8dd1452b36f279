// @openai/agents: its default is the Responses API.
import { Agent, run, setDefaultOpenAIClient, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
import { check, FOX, KEY, MODEL, V1 } from "./tour.mjs";

setTracingDisabled(true);
setDefaultOpenAIClient(new OpenAI({ baseURL: V1, apiKey: KEY }));
const modelSettings = { maxTokens: 40, temperature: 0 };
await check("text", async () => (await run(new Agent({ name: "a", model: MODEL, modelSettings }), FOX)).finalOutput);
await check("tools", async () => {
  let called = 0;
  const yes = tool({ name: "answer", description: "Answer.", parameters: z.object({ yes: z.boolean() }), execute: async () => { called += 1; return "done"; } });
  const agent = new Agent({ name: "t", model: MODEL, tools: [yes], toolUseBehavior: "stop_on_first_tool", modelSettings: { ...modelSettings, toolChoice: "required", parallelToolCalls: false, maxTokens: 60 } });
  await run(agent, FOX);
  return called > 0;
});
