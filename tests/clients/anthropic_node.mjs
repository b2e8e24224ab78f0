// @anthropic-ai/sdk for Node: messages and stream; argv[2] is the server's address.
import assert from "node:assert";
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "unused", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Tom has 3 apples and buys 4 more. How many?" }];
const options = { model, messages, max_tokens: 512, temperature: 0 };
const whole = await client.messages.create(options);
const final = await client.messages.stream(options).finalMessage();
assert.deepEqual(final.content, whole.content);
assert.equal(final.stop_reason, whole.stop_reason);
const counted = await client.messages.countTokens({ model, messages });
assert.equal(counted.input_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens);
const manifest = new URL("node_modules/@anthropic-ai/sdk/package.json", import.meta.url);
console.log("@anthropic-ai/sdk", JSON.parse(readFileSync(manifest)).version);
