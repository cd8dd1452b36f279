// AI SDK: its OpenAI provider (Responses API), its OpenAI-compatible provider and its Anthropic provider.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { check, FOX, KEY, MODEL, V1 } from "./tour.mjs";

const models = {
  "@ai-sdk/openai": createOpenAI({ baseURL: V1, apiKey: KEY })(MODEL),
  "@ai-sdk/openai-compatible": createOpenAICompatible({ name: "here", baseURL: V1, apiKey: KEY, supportsStructuredOutputs: true })(MODEL),
  "@ai-sdk/anthropic": createAnthropic({ baseURL: V1, apiKey: KEY })(MODEL),
};
const providerOptions = { openai: { parallelToolCalls: false }, anthropic: { disableParallelToolUse: true }, here: { parallel_tool_calls: false } };
const inputSchema = z.object({ a: z.number().int().min(0).max(99), b: z.number().int().min(0).max(99) });
const add = tool({ description: "Add", inputSchema, execute: async ({ a, b }) => String(a + b) });
for (const [name, model] of Object.entries(models)) {
  await check(`${name}: text, streams`, async () => {
    let text = "";
    for await (const piece of streamText({ model, prompt: FOX, maxOutputTokens: 20 }).textStream) text += piece;
    return text && (await generateText({ model, system: "Be kind.", prompt: FOX, maxOutputTokens: 20 })).text;
  });
  await check(`${name}: tools in two steps`, async () => {
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" });
    const run = await generateText({ model, prompt: "Add 1 and 2", tools: { add }, stopWhen: stepCountIs(2), temperature: 0, providerOptions, prepareStep, maxOutputTokens: 200 });
    return run.steps.length === 2 && run.steps[0].toolCalls.length > 0;
  });
  await check(`${name}: structured output`, async () => {
    const made = await generateText({ model, prompt: "Yes?", output: Output.object({ schema: z.object({ yes: z.boolean() }) }), maxOutputTokens: 60 });
    return typeof made.output.yes === "boolean";
  });
}
