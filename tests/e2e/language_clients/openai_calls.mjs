// Calls of OpenAI's package for JavaScript. Its report is that of the programs in Python, see client_report.py.
import OpenAI from 'openai'

const [url, metrics] = process.argv.slice(2)
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0 })
const user = (content) => [{ role: 'user', content }]
const ask = (model, messages, more = {}, options = {}) =>
  client.chat.completions.create({ model, messages, temperature: 0, ...more }, options)
const errorOf = async (call) => {
  try {
    await call()
  } catch (error) {
    return `${error.constructor.name}: ${error.message}`
  }
  return ''
}

async function running() {
  const text = await (await fetch(metrics)).text()
  return Number(text.match(/^vllm:num_requests_running\{[^}]*model_name="slow"[^}]*\} (\S+)$/m)[1])
}

async function isSoon(count) {
  const end = Date.now() + 20000
  while ((await running()) !== count) {
    if (Date.now() > end) return false
    await new Promise((done) => setTimeout(done, 50))
  }
  return true
}

const weather = {
  type: 'function',
  function: {
    name: 'weather',
    description: 'Weather of a city',
    parameters: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] },
    parse: JSON.parse,
  },
}
const thing = {
  type: 'object',
  properties: { size: { type: 'integer' } },
  required: ['size'],
  additionalProperties: false,
}
const features = {
  async chat() {
    const answer = await ask('tiny', user('what is the capital of Japan?'))
    return { package: answer.choices[0].message.content }
  },
  async stream() {
    const parts = []
    for await (const chunk of await ask('tiny', user('count from three'), { stream: true })) {
      const text = chunk.choices[0]?.delta.content
      if (text) parts.push(text)
    }
    return { package: parts }
  },
  async tools() {
    const found = {}
    for (const stream of [false, true]) {
      const called = []
      const call = (given) => {
        called.push(given)
        return '4'
      }
      const tools = [{ ...weather, function: { ...weather.function, function: call } }]
      const runner = client.chat.completions.runTools({ model: 'talker', messages: user('weather'), tools, stream })
      found[stream ? 'streamed' : 'whole'] = [called, await runner.finalContent()]
    }
    return Object.fromEntries(Object.entries(found).map(([way, [called, answer]]) => [way, [...called, answer]]))
  },
  async schema() {
    const response_format = { type: 'json_schema', json_schema: { name: 'thing', schema: thing, strict: true } }
    const answer = await ask('wide', user('say hello'), { response_format })
    return { package: JSON.parse(answer.choices[0].message.content) }
  },
  async embeddings() {
    return { package: (await client.embeddings.create({ model: 'embedder', input: 'hello' })).data[0].embedding }
  },
  async errors() {
    const found = {}
    for (const stream of [false, true])
      found[stream ? 'streamed' : 'whole'] = [
        await errorOf(() => ask('nosuch', user('hello'), { stream })),
        await errorOf(() => ask('tiny', user('x'.repeat(3000)), { stream })),
      ]
    return found
  },
  async timeout() {
    const error = await errorOf(() => ask('slow', user('hello'), {}, { timeout: 1000 }))
    return { package: [error, await isSoon(0)] }
  },
  async cancel() {
    let wasRunning
    for await (const _ of await ask('slow', user('hello'), { stream: true })) {
      wasRunning = await isSoon(1)
      break
    }
    return { package: [wasRunning, await isSoon(0)] }
  },
}

const report = {}
for (const [name, call] of Object.entries(features)) report[name] = await call()
console.log(JSON.stringify(report))
