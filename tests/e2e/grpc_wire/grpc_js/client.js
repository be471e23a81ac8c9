// Calls of gRPC's own client for Node.js. Prints one line of JSON: what each case saw.
//
//     node client.js HOST:PORT FOLDER_OF_PROTO_FILES
'use strict';

const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const [address, protos] = process.argv.slice(2);
const definition = loader.loadSync('grpc_service.proto', { includeDirs: [protos], keepCase: true, longs: Number });
const { GRPCInferenceService } = grpc.loadPackageDefinition(definition).inference;
const LIMIT = 64 << 20;

function connect(more) {
  return new GRPCInferenceService(address, grpc.credentials.createInsecure(), {
    'grpc.max_receive_message_length': LIMIT, 'grpc.max_send_message_length': LIMIT, ...more,
  });
}

function request(model, id, count) {
  const bytes = Buffer.alloc(count, 7);
  return {
    model_name: model, id, inputs: [{ name: 'INPUT0', datatype: 'UINT8', shape: [1, count] }], raw_input_contents: [bytes],
  };
}

function numbers(values, delayMs) {
  const tensor = (name, datatype, array) => ({ name, datatype, shape: [array.length] });
  const raw = (array) => Buffer.from(array.buffer);
  const content = Int32Array.from(values);
  const delay = new Uint32Array(values.length).fill(delayMs);
  const wait = new Uint32Array(1);
  return {
    model_name: 'repeat',
    inputs: [tensor('IN', 'INT32', content), tensor('DELAY', 'UINT32', delay), tensor('WAIT', 'UINT32', wait)],
    raw_input_contents: [raw(content), raw(delay), raw(wait)],
  };
}

// Return what a unary call ended with: its response, or code and details.
function infer(client, message, { metadata = new grpc.Metadata(), options = {}, cancelMs } = {}) {
  return new Promise((resolve) => {
    const call = client.ModelInfer(message, metadata, options, (error, response) => {
      if (error) resolve({ code: grpc.status[error.code], details: error.details });
      else resolve({ code: 'OK', id: response.id, size: response.raw_output_contents[0].length });
    });
    if (cancelMs !== undefined) setTimeout(() => call.cancel(), cancelMs);
  });
}

// Send messages on a stream, half-close it, and return what came and how it ended. `onResponse` may cancel the call.
function stream(client, messages, { options = {}, onResponse = () => {} } = {}) {
  return new Promise((resolve) => {
    const call = client.ModelStreamInfer(new grpc.Metadata(), options);
    const responses = [];
    call.on('data', (item) => {
      responses.push(item.error_message || item.infer_response.id || item.infer_response.raw_output_contents[0].readInt32LE());
      onResponse(call);
    });
    call.on('error', () => {});
    call.on('status', (status) => resolve({ code: grpc.status[status.code], responses }));
    messages.forEach((message) => call.write(message));
    call.end();
  });
}

async function pingPong(client) {
  const call = client.ModelStreamInfer();
  const responses = [];
  const ended = new Promise((resolve) => call.on('status', (status) => resolve(grpc.status[status.code])));
  for (let number = 0; number < 20; number += 1) {
    const answer = new Promise((resolve) => call.once('data', resolve));
    call.write(request('same', `${number}`, 100 + number));
    const item = await answer;
    responses.push(`${item.infer_response.id}:${item.infer_response.raw_output_contents[0].length}`);
  }
  call.end();
  return { code: await ended, responses };
}

async function main() {
  const client = connect();
  const found = {};
  found.unary = await infer(client, request('same', 'a', 10));
  found.large = await infer(client, request('same', 'b', 8 << 20));
  found.many = await Promise.all(Array.from({ length: 200 }, (_, number) => infer(client, request('same', `${number}`, 1 + number))));
  const metadata = new grpc.Metadata();
  metadata.set('x-camera', 'front');
  metadata.add('x-camera', 'rear');
  metadata.set('x-raw-bin', Buffer.from([0, 255, 10, 13]));
  found.metadata = await infer(client, request('same', 'm', 1), { metadata });
  found.error = await infer(client, request('t\u00e9st \u263a 100%', 'c', 1));
  found.deadline = await infer(client, request('slow', 'd', 1), { options: { deadline: Date.now() + 60 } });
  found.cancelled = await infer(client, request('slow', 'e', 1), { cancelMs: 60 });
  const zipped = connect({ 'grpc.default_compression_algorithm': 2 });
  found.gzip = await infer(zipped, request('same', 'z', 100000));
  zipped.close();
  found.stream = await stream(client, [...Array(50).keys()].map((number) => request('same', `${number}`, 1)));
  found.pingPong = await pingPong(client);
  found.decoupled = await stream(client, [numbers([4, 5, 6], 1)]);
  found.emptyStream = await stream(client, []);
  found.streamDeadline = await stream(client, [numbers(Array(1000).fill(1), 20)], { options: { deadline: Date.now() + 300 } });
  found.streamCancelled = await stream(client, [numbers(Array(1000).fill(1), 20)], { onResponse: (call) => call.cancel() });
  found.last = await infer(client, request('same', 'last', 10));
  client.close();
  console.log(JSON.stringify(found));
}

main().catch((error) => {
  console.error(error);
  process.exitCode = 1;
});
