// The AI SDK against a server: node ai_sdk.mjs chat|loop URL MODEL QUESTION. Prints JSON like ../programs.py.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [part, baseURL, name, prompt] = process.argv.slice(2);
const model = createOpenAICompatible({ name: "dflash", baseURL, apiKey: "none" })(name);

async function chat() {
  const { text } = await generateText({ model, prompt });
  let streamed = "";
  for await (const piece of streamText({ model, prompt }).textStream) streamed += piece;
  return { texts: [text, streamed] };
}

async function loop() {
  const calls = [];
  const weather = tool({
    description: "Return the current weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      calls.push(city);
      return "sunny";
    },
  });
  const { text } = await generateText({ model, prompt, tools: { get_weather: weather }, stopWhen: stepCountIs(4) });
  return { calls, answer: text };
}

console.log(JSON.stringify(await { chat, loop }[part]()));
