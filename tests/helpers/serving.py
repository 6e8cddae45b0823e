"""A local server that answers like vLLM's completions endpoint, with faults on request."""

import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args): ...

    def do_GET(self):
        if self.server.faults[:1] == [401]:
            self._send({"error": {"message": "this is a 401"}}, self.server.faults.pop(0))
            return
        listed = [{"id": name} for name in self.server.names]
        base = self.server.names[0]
        listed += [{"id": name, "parent": base} for name in ("tuned", *self.server.adapters)]
        self._send({"data": listed})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body, self.headers.get("Authorization")))
        if self.path == "/tokenize":
            ids = self.server.backbone.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
            self._send({"tokens": [*ids, *self.server.extra_ids]})
            return
        if self.path.endswith("_lora_adapter"):
            self._adapter(body)
            return
        if body["model"] not in {*self.server.names, *self.server.adapters}:
            self._send({"error": {"message": f"The model {body['model']} does not exist."}}, 404)
            return
        named = body.get("prompt_logprobs", 0)
        if self.server.most_logprobs != -1 and not 0 <= named <= self.server.most_logprobs:
            most = self.server.most_logprobs
            message = f"Requested prompt logprobs of {named}, which is greater than max allowed: {most}"
            self._send({"error": {"message": message}}, 400)
            return
        fault = self.server.faults.pop(0) if self.server.faults else None
        if fault == "slow":
            time.sleep(self.server.slow)
        if fault in (500, 503, 429, 400, 401):
            self._send({"error": {"message": f"this is a {fault}"}}, fault)
            return
        with self.server.one_at_a_time:
            answer = self.server.graded(body) if body.get("prompt_logprobs") else self.server.completed(body)
        choice = answer["choices"][0]
        rows = choice.get("prompt_logprobs")
        match fault:
            case "short":
                rows.pop()
            case "other tokens":
                rows[-1] = {str(int(k) + 1): v for k, v in rows[-1].items()}
            case "nan":
                next(iter(rows[-1].values()))["logprob"] = float("nan")
            case "certain of everything":
                rows[-1] = {k: {**v, "logprob": 0.0} for k, v in rows[-1].items()}
            case "few":
                rows[-1] = dict(list(rows[-1].items())[-1:])
            case "beyond":
                rows[-1]["999999"] = {"logprob": -1.0}
            case "no choice":
                answer = {"choices": []}
            case "aborted":
                del choice["token_ids"][1:], choice["logprobs"]["token_logprobs"][1:]
        self._send(answer, cut=fault == "truncated")

    def _adapter(self, body):
        name = body["lora_name"]
        if self.path == "/v1/unload_lora_adapter":
            self.server.adapters.pop(name, None)
            self._send(f"Success: {name} removed")
        elif self.server.takes_adapters:
            with self.server.one_at_a_time:
                loaded = name in self.server.adapters
                self.server.adapters[name] = body["lora_path"]
            if loaded:  # vLLM's answer
                self._send({"error": {"message": f"The lora adapter '{name}' has already been loaded."}}, 400)
            else:
                self._send(f"Success: {name} added")
        else:
            self._send({"error": {"message": "LoRA is off"}}, 404)

    def handle(self):
        with contextlib.suppress(ConnectionError):
            super().handle()

    def _send(self, answer, status=200, cut=False):
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.close_connection = True


class ModelServer(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, backbone, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.backbone, self.model = backbone, backbone.causal_lm
        self.names, self.faults, self.seen, self.extra_ids, self.slow = ["teacher"], [], [], [], 1.0
        self.most_logprobs = 20  # vLLM's --max-logprobs
        self.adapters, self.takes_adapters, self._loaded = {}, True, None
        self.one_at_a_time = threading.Lock()
        self._connections = []

    def get_request(self):
        connection, address = super().get_request()
        self._connections.append(connection)
        return connection, address

    def hang_up(self):
        """Close the connections that clients keep open."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    @torch.no_grad()
    def _log_probs(self, ids, name="teacher"):
        folder = self.adapters.get(name)
        if folder and self._loaded != name:
            self.backbone.drop_adapters()
            self.backbone.load_adapter(Path(folder), "student")
            self._loaded = name
        with self.backbone.state("student" if folder else "base") as model:
            return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)

    def graded(self, body):
        ids, k = body["prompt"], body["prompt_logprobs"]
        log_p = self._log_probs(ids)
        rows = [None]
        for token, row in zip(ids[1:], log_p, strict=False):
            top = row.topk(len(row) if k == -1 else k)
            named = {int(i): float(v) for i, v in zip(top.indices, top.values, strict=True)}
            named.setdefault(token, float(row[token]))
            rows.append({str(i): {"logprob": v, "rank": n} for n, (i, v) in enumerate(named.items(), 1)})
        return {"choices": [{"prompt_logprobs": rows, "prompt_token_ids": ids}]}

    def completed(self, body):
        ids, completion, logprobs = list(body["prompt"]), [], []
        generator = torch.Generator().manual_seed(body["seed"])
        for _ in range(body["max_tokens"]):
            row = self._log_probs(ids, body["model"])[-1]
            drawn = torch.multinomial(row.exp(), 1, generator=generator)
            token = int(drawn if body["temperature"] else row.argmax())
            ids.append(token)
            completion.append(token)
            logprobs.append(float(row[token]))
            if token in body["stop_token_ids"]:
                break
        given = {"token_ids": completion, "logprobs": {"token_logprobs": logprobs}, "finish_reason": "stop"}
        return {"choices": [given]}


@contextlib.contextmanager
def serving(backbone, port=0):
    server = ModelServer(backbone, port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.hang_up()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def serving_model(folder):
    """Serve the model in a folder, and return the address."""
    from opdcl.config.model import ModelConfig
    from opdcl.model.load_backbone import load_backbone

    with serving(load_backbone(ModelConfig(id=str(folder), dtype="float32"))) as server:
        yield server.url
