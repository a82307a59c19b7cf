// Streams the answer to a chat message: npm start -- [ADDRESS] [MESSAGE]
import { fileURLToPath } from "node:url";
import * as grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import type { ProtoGrpcType } from "./stubs/generation";
import type { GenerateRequest } from "./stubs/specpool/v1/GenerateRequest";
import type { GenerateResponse__Output } from "./stubs/specpool/v1/GenerateResponse";
import type { GenerationServiceClient } from "./stubs/specpool/v1/GenerationService";

const PROTOS = fileURLToPath(new URL("../../../protos", import.meta.url));
const DEADLINE_MS = 60_000;

function connect(address: string): GenerationServiceClient {
  const definition = loadSync("specpool/v1/generation.proto", {
    keepCase: true,
    longs: String,
    enums: String,
    defaults: true,
    oneofs: true,
    includeDirs: [PROTOS],
  });
  const { specpool } = grpc.loadPackageDefinition(definition) as unknown as ProtoGrpcType;
  return new specpool.v1.GenerationService(address, grpc.credentials.createInsecure());
}

// Shows text as it arrives, and resolves to the complete result.
function stream(
  client: GenerationServiceClient,
  request: GenerateRequest,
  show: (text: string) => void,
): Promise<GenerateResponse__Output> {
  return new Promise((resolve, reject) => {
    const call = client.GenerateStream(request, { deadline: Date.now() + DEADLINE_MS });
    call.on("data", (message) => {
      if (message.response === "chunk" && message.chunk) show(message.chunk.text);
      if (message.response === "complete" && message.complete) resolve(message.complete);
    });
    call.on("error", reject);
  });
}

const [address = "127.0.0.1:50050", content = "Name three fruits."] = process.argv.slice(2);
const client = connect(address);
try {
  const request: GenerateRequest = {
    chat: { messages: [{ role: "user", content }] },
    sampling_params: { max_tokens: 40, temperature: 0.7, seed: "7" },
  };
  const answer = await stream(client, request, (text) => process.stdout.write(text));
  const { usage, speculative_decoding: speculation } = answer;
  console.log(`\n[${answer.finish_reason}, ${usage?.completion_tokens} tokens, seed ${answer.seed}]`);
  const drafted = speculation?.num_draft_tokens ?? 0; // 0 while the server measures no gain from drafts
  console.log(drafted ? `[${speculation?.num_accepted_draft_tokens} of ${drafted} draft tokens accepted]` : "[no drafts]");

  // Constrain the answer to a second question. Other constraints: `regex`, `grammar`, `choice`, `json_object`, `structural_tag`.
  const schema = { enum: ["short", "long"] };
  const rating = await stream(
    client,
    {
      chat: { messages: [{ role: "user", content: `Is this short or long? ${answer.text}` }] },
      sampling_params: { json_schema: JSON.stringify(schema) },
    },
    () => {},
  );
  console.log(`[the model calls this answer ${JSON.parse(rating.text)}]`);
} catch (error) {
  const { code, details } = error as grpc.ServiceError;
  console.error(`${grpc.status[code]}: ${details}`);
  process.exitCode = 1;
} finally {
  client.close();
}
