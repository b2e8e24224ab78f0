// openai for Node: chat, stream, responses; argv[2] is the server's address.
import assert from "node:assert";
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "unused", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Tom has 3 apples and buys 4 more. How many?" }];
const parameters = { type: "object", properties: { a: { type: "number" } } };
const tools = [{ type: "function", function: { name: "add", parameters } }];
const options = { model, messages, tools, max_tokens: 512, temperature: 0 };
const whole = await client.chat.completions.create(options);
const final = await client.chat.completions.stream(options).finalChatCompletion();
assert.equal(final.choices[0].message.content ?? "", whole.choices[0].message.content ?? "");

const request = { model, input: messages, max_output_tokens: 512, temperature: 0 };
const response = await client.responses.create(request);
const streamed = await client.responses.stream(request).finalResponse();
assert.equal(streamed.output_text, response.output_text);
const manifest = new URL("node_modules/openai/package.json", import.meta.url);
console.log("openai", JSON.parse(readFileSync(manifest)).version);
