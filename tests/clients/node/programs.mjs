// Clients of Node against a server: node programs.mjs NAME chat|loop|turns URL MODEL QUESTION. Prints JSON like ../programs.py.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as agents from "@openai/agents";
import { generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const [client, part, baseURL, name, question] = process.argv.slice(2);
const calls = [];
const weather = {
  description: "Return the current weather in a city.",
  parameters: z.object({ city: z.string() }),
  execute: async ({ city }) => {
    calls.push(city);
    return "sunny";
  },
};

function aiSdk(model) {
  const tools = { get_weather: tool({ ...weather, inputSchema: weather.parameters }) };
  const told = [];
  return {
    async ask(content, offered) {
      told.push({ role: "user", content });
      const asked = { model, messages: told, ...(offered && { tools, stopWhen: stepCountIs(4) }) };
      const { text, response } = await generateText(asked);
      told.push(...response.messages);
      return text;
    },
    async stream(content, offered) {
      told.push({ role: "user", content });
      const asked = { model, messages: told, ...(offered && { tools, stopWhen: stepCountIs(4) }), onError: fail };
      let streamed = "";
      for await (const piece of streamText(asked).textStream) streamed += piece;
      return streamed;
    },
  };
}

function agentsJs(api, stored = false) {
  agents.setOpenAIAPI(api);
  agents.setDefaultOpenAIClient(new OpenAI({ baseURL, apiKey: "none" }));
  const tools = [agents.tool({ name: "get_weather", ...weather })];
  let told = [];
  let previousResponseId;
  const run = (content, offered, options) => {
    const agent = new agents.Agent({ name: "guide", model: name, ...(offered && { tools }) });
    const asked = previousResponseId ? content : [...told, agents.user(content)];
    return agents.run(agent, asked, { previousResponseId, ...options });
  };
  return {
    async ask(content, offered) {
      const result = await run(content, offered);
      if (stored) previousResponseId = result.lastResponseId;
      told = result.history;
      return result.finalOutput;
    },
    async stream(content, offered) {
      const result = await run(content, offered, { stream: true });
      let streamed = "";
      for await (const piece of result.toTextStream()) streamed += piece;
      await result.completed;
      return streamed;
    },
  };
}

function fail({ error }) {
  throw error;
}

const clients = {
  "AI SDK": () => aiSdk(createOpenAICompatible({ name: "dflash", baseURL, apiKey: "none" })(name)),
  "AI SDK, @ai-sdk/openai": () => aiSdk(createOpenAI({ baseURL, apiKey: "none" })(name)),
  "Agents JS": () => agentsJs("responses"),
  "Agents JS, chat.completions": () => agentsJs("chat_completions"),
  "Agents JS, previousResponseId": () => agentsJs("responses", true),
};

const parts = {
  chat: async () => ({ texts: [await clients[client]().ask(question), await clients[client]().stream(question)] }),
  loop: async () => ({ calls, answer: await clients[client]().ask(question, true) }),
  async turns() {
    const one = clients[client]();
    return { answers: [await one.ask(question, true), await one.ask("Again?", true), await one.stream("Again?", true)], calls };
  },
};
console.log(JSON.stringify(await parts[part]()));
