// Vercel's AI SDK: its seven models over the four APIs; argv: embedded server, scripted server.
import assert from "node:assert";
import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";
import { z } from "zod";

const [embedded, scripted] = process.argv.slice(2).map(modelsOf);
const question = "Tom has 3 apples and buys 4 more. How many?";
const options = { temperature: 0, maxRetries: 0, maxOutputTokens: 512 };
const schema = z.object({ apples: z.number().int().min(0).max(99), isEnough: z.boolean() });
// @ai-sdk/openai reads no thinking of chats, and of responses only summaries.
const thinkingOf = { "openai-compatible": "I write the file.", "anthropic": "I write the file." };
const call = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>';

function modelsOf(address) {
  const sent = [];
  const recorded = (url, request) => {
    sent.push(JSON.parse(request.body));
    return fetch(url, request);
  };
  const common = { apiKey: "unused", baseURL: `${address}/v1`, fetch: recorded };
  const openai = createOpenAI(common);
  const settings = { supportsStructuredOutputs: true, includeUsage: true };
  const compatible = createOpenAICompatible({ name: "openspec", ...common, ...settings });
  const anthropic = createAnthropic(common);
  const chats = {
    "openai": openai("tiny"),
    "openai.chat": openai.chat("tiny"),
    "openai-compatible": compatible("tiny"),
    "anthropic": anthropic("tiny"),
  };
  const completions = [openai.completion("tiny"), compatible.completionModel("tiny")];
  return { sent, chats, completions, openai };
}

function played(...answers) {
  const plan = JSON.stringify({ id: randomUUID(), answers });
  const padded = plan.padEnd(3 * Math.ceil(plan.length / 3)); // base64 without a remainder
  return `Play [[${Buffer.from(padded).toString("base64url")}]]`;
}

function check({ text, usage, finishReason }) {
  assert(text.length > 0 && usage.inputTokens > 0 && usage.outputTokens > 0);
  assert(["stop", "length"].includes(finishReason));
}

async function collected(result) {
  const kinds = new Set();
  for await (const part of result.fullStream) kinds.add(part.type);
  assert(kinds.has("text-delta") && kinds.has("finish") && !kinds.has("error"), [...kinds].join());
  const [text, usage, finishReason, steps] = await Promise.all([
    result.text,
    result.usage,
    result.finishReason,
    result.steps,
  ]);
  return { kinds, text, usage, finishReason, steps };
}

async function texts(model) {
  const whole = await ai.generateText({ ...options, model, prompt: question });
  check(whole);
  const streamed = await collected(ai.streamText({ ...options, model, prompt: question }));
  check(streamed);
  assert.equal(streamed.text, whole.text);
  return whole;
}

async function objects(name, model) {
  const asked = { ...options, model, schema, prompt: question };
  const { object, usage } = await ai.generateObject(asked);
  assert(schema.safeParse(object).success && usage.outputTokens > 0);
  const streamed = ai.streamObject(asked);
  let partial;
  for await (partial of streamed.partialObjectStream);
  assert.deepEqual(await streamed.object, partial);
  assert.deepEqual(partial, object);
  const output = ai.Output.object({ schema });
  const formed = await ai.generateText({ ...options, model, output, prompt: question });
  assert.deepEqual(formed.output, object);
  if (name === "anthropic") return; // its form is a tool, which a call that must come may be
  // A call that must come beside the form of the last answer.
  const forced = { toolChoice: "required", tools: { add: add() }, output, prompt: question };
  const { toolCalls, finishReason } = await ai.generateText({ ...options, model, ...forced });
  assert.equal(finishReason, "tool-calls");
  assert.equal(typeof toolCalls[0].input.a, "number");
}

function add(ran = []) {
  return ai.tool({
    description: "Adds",
    inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
    execute: (given) => ran.push(given) && given.a + given.b,
  });
}

async function loops(model, thinking) {
  const ran = [];
  const given = { ...options, model, tools: { add: add(ran) }, stopWhen: ai.stepCountIs(3) };
  const asked = () => ({ ...given, prompt: played(call, "It is 7.") });
  const whole = await ai.generateText(asked());
  const streamed = await collected(ai.streamText(asked()));
  assert(streamed.kinds.has("tool-call") && streamed.kinds.has("tool-result"));
  for (const { steps, text } of [whole, streamed]) {
    assert.equal(text, "It is 7.");
    assert.deepEqual(steps.map((step) => step.finishReason), ["tool-calls", "stop"]);
    assert.equal(steps[0].toolResults[0].output, 7);
    assert.equal(steps[0].reasoningText ?? "", thinking);
  }
  assert.deepEqual(ran, [{ a: 3, b: 4 }, { a: 3, b: 4 }]);
}

for (const [name, model] of Object.entries(embedded.chats)) {
  const first = await texts(model);
  const asked = { role: "user", content: question };
  const messages = [asked, ...first.response.messages, asked];
  check(await ai.generateText({ ...options, model, messages }));
  await objects(name, model);
  await loops(scripted.chats[name], thinkingOf[name] ?? "");
}
for (const model of embedded.completions) await texts(model);

const turns = [embedded, scripted].map(({ sent }) => JSON.stringify(sent));
assert(turns.every((sent) => sent.includes("item_reference")));

for (const name of ["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic"]) {
  const manifest = new URL(`node_modules/${name}/package.json`, import.meta.url);
  console.log(name, JSON.parse(readFileSync(manifest)).version);
}
