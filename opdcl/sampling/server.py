"""A model behind an OpenAI-compatible completions endpoint that tells log-probabilities of prompts, such as vLLM's.

Ids are sent and ids come back, so that every log-probability belongs to the token it is meant for; an answer that is not
whole, has another length, other tokens, or numbers that are no log-probabilities, is asked for again and never used. A
server that is gone is waited for.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from pathlib import Path
from typing import Any

import httpx2
import tenacity
import torch

from opdcl.config.server import ServerSection
from opdcl.errors import OpdclError, UsageError
from opdcl.model.distributions import TopTokens
from opdcl.sampling.rollout import Rollout

KEY = "OPDCL_SERVER_KEY"

# Attempts at an answer that does not hold: once may be an accident, three times is how this server answers.
ATTEMPTS = 3

# Opinions kept until they are asked for.
KEPT = 4096

# How far rounding may take probabilities above one.
SLACK = 1e-3

Ids = Sequence[int]


class _Gone(Exception):
    """The server cannot be reached, or says that it cannot answer now."""


class _Garbled(Exception):
    """The answer does not hold."""


class Server:
    """What a server says of token sequences, many requests in flight at once over connections that are kept.

    Args:
        config: Where it is, and how patient to be.
        vocabulary: Number of token ids that there are.
        notify: Called with a sentence when the server is waited for.
    """

    def __init__(
        self, config: ServerSection, vocabulary: int, notify: Callable[[str], None] = lambda text: None
    ):
        self.config, self.vocabulary, self.notify = config, vocabulary, notify
        self._client = _client(config)
        self._closed = threading.Event()
        self._work: queue.SimpleQueue[tuple[Future, Callable, tuple] | None] = queue.SimpleQueue()
        # Daemons, not a pool: who leaves must not wait for an answer that may never come.
        for _ in range(config.concurrency):
            threading.Thread(target=self._worker, daemon=True, name="server").start()
        self._asked: OrderedDict[tuple[tuple[int, ...], tuple[int, ...]], Future[TopTokens]] = OrderedDict()
        self._adapters: dict[str, str] = {}
        self._waits = False
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self.model = config.model or self._only_model()

    def close(self) -> None:
        """Give up what is still in flight."""
        self._closed.set()
        for _ in range(self.config.concurrency):
            self._work.put(None)
        self._client.close()

    def _submit(self, do: Callable[..., Any], *given: Any) -> Future:
        future: Future = Future()
        self._work.put((future, do, given))
        return future

    def _worker(self) -> None:
        while work := self._work.get():
            future, do, given = work
            try:
                if self._closed.is_set():
                    raise OpdclError(f"the server at {self.config.url} is no longer asked")
                future.set_result(do(*given))
            except BaseException as fault:  # its asker is told
                future.set_exception(fault)

    def encode(self, text: str) -> list[int]:
        """Return the ids that the server's tokenizer makes of a text, without special ones of its own."""
        asked = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return self._ask("tokenize", asked, lambda answer: list(map(int, answer["tokens"])))

    def ask(self, prompt_ids: Ids, completion_ids: Ids) -> Future[TopTokens]:
        """Ask what the model thinks of a completion, in the background; the same question is asked once."""
        key = tuple(prompt_ids), tuple(completion_ids)
        with self._lock:
            if (known := self._asked.get(key)) is None or (known.done() and known.exception()):
                known = self._asked[key] = self._submit(self._grade, *key)
            self._asked.move_to_end(key)
            while len(self._asked) > KEPT:
                self._asked.popitem(last=False)
        return known

    def complete(
        self,
        prompts: Sequence[Ids],
        max_new_tokens: int,
        eos_ids: Ids,
        temperature: float,
        seed: int = 0,
        model: str | None = None,
        on_finished: Callable[[list[Rollout]], None] | None = None,
    ) -> list[Rollout]:
        """Let the model, or an adapter that was loaded under a name, complete prompts; temperature 0 is greedy decoding."""

        def one(number: int) -> Rollout:
            asked = {
                "model": model or self.model,
                "prompt": list(prompts[number]),
                "max_tokens": max_new_tokens,
                "temperature": temperature,
                "seed": (seed * 1_000_003 + number) % 2**31,
                "logprobs": 0,
                "return_token_ids": True,
                "stop_token_ids": list(eos_ids),
                "skip_special_tokens": False,
                "add_special_tokens": False,
                # What a checkpoint's own defaults would change.
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
            }
            return self._ask(
                "completions",
                asked,
                lambda answer: self._written(answer, prompts[number], eos_ids, max_new_tokens),
            )

        asked = {self._submit(one, number): number for number in range(len(prompts))}
        found: dict[int, Rollout] = {}
        for future in as_completed(asked):
            found[asked[future]] = future.result()
            if on_finished:
                on_finished([found[asked[future]]])
        return [found[number] for number in range(len(prompts))]

    @contextlib.contextmanager
    def adapter(self, folder: Path) -> Iterator[str]:
        """Have the server load an adapter from a folder that it sees too; yield the name under which it answers."""
        name = f"opdcl-{uuid.uuid4().hex[:12]}"
        self._adapters[name] = str(folder.resolve())
        self._load(name)
        try:
            yield name
        finally:
            del self._adapters[name]
            # One short attempt: a server that is gone holds no adapters.
            with contextlib.suppress(httpx2.TransportError, RuntimeError):
                self._client.post("v1/unload_lora_adapter", json={"lora_name": name}, timeout=10)

    def _load(self, name: str) -> None:
        try:
            with self._loading:  # of many requests that miss it, one loads it
                self._request(
                    "v1/load_lora_adapter",
                    {"lora_name": name, "lora_path": self._adapters[name]},
                    lambda response: None,
                )
        except UsageError as fault:
            if "already" in fault.message:
                return
            raise UsageError(
                fault.message,
                "start it with `opdcl serve RUN`, or with --enable-lora, a --max-lora-rank that fits, and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, on a machine that sees the run's directory",
            ) from fault

    # -- one question ------------------------------------------------------------------------------------------------

    def _grade(self, prompt_ids: Ids, completion_ids: Ids) -> TopTokens:
        asked = {
            "model": self.model,
            "prompt": [*prompt_ids, *completion_ids],
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": self.config.top_k,
            "return_token_ids": True,
            "add_special_tokens": False,
        }
        return self._ask(
            "completions", asked, lambda answer: self._distribution(answer, prompt_ids, completion_ids)
        )

    def _distribution(self, answer: dict[str, Any], prompt_ids: Ids, completion_ids: Ids) -> TopTokens:
        """Return what an answer says of each completion token, after checking that it is said of these tokens."""
        ids = [*prompt_ids, *completion_ids]
        rows = _choice(answer)["prompt_logprobs"]
        if len(rows) != len(ids):
            raise _Garbled(f"log-probabilities of {len(rows)} tokens came back for {len(ids)}")
        k = self.config.top_k
        tokens, tops, values = [], [], []
        for token, row in zip(completion_ids, rows[len(prompt_ids) :], strict=True):
            named = {int(one): float(said["logprob"]) for one, said in row.items()}
            if token not in named:
                raise _Garbled(
                    f"nothing is said of token {token}: the server reads other tokens than were sent"
                )
            if bad := [one for one in named if not 0 <= one < self.vocabulary]:
                raise _Garbled(f"token {bad[0]} is none of {self.vocabulary}")
            if bad := [value for value in named.values() if not math.isfinite(value) or value > SLACK]:
                raise _Garbled(f"{bad[0]} is no log-probability")
            likeliest = sorted(named, key=lambda one: named[one], reverse=True)[:k]
            if len(likeliest) < k:
                raise _Garbled(f"{len(likeliest)} tokens are named where {k} were asked for")
            if (mass := sum(math.exp(named[one]) for one in likeliest)) > 1 + SLACK:
                raise _Garbled(f"the likeliest tokens have a probability of {mass:.3f} together")
            tokens.append(named[token])
            tops.append(likeliest)
            values.append([named[one] for one in likeliest])
        return TopTokens(
            torch.tensor(list(completion_ids)), torch.tensor(tokens), torch.tensor(tops), torch.tensor(values)
        )

    def _written(self, answer: dict[str, Any], prompt_ids: Ids, eos_ids: Ids, longest: int) -> Rollout:
        choice = _choice(answer)
        ids, logprobs = (
            list(map(int, choice["token_ids"])),
            [float(x) for x in choice["logprobs"]["token_logprobs"]],
        )
        if len(ids) != len(logprobs) or not 0 < len(ids) <= longest:
            raise _Garbled(
                f"{len(ids)} tokens came with {len(logprobs)} log-probabilities, where at most {longest} were asked for"
            )
        if bad := [x for x in logprobs if not math.isfinite(x) or x > SLACK]:
            raise _Garbled(f"{bad[0]} is no log-probability")
        if any(not 0 <= one < self.vocabulary for one in ids):
            raise _Garbled(f"a token is none of {self.vocabulary}")
        if ids[-1] not in eos_ids and len(ids) < longest:
            raise _Garbled(f"a completion broke off after {len(ids)} of {longest} tokens")
        return Rollout(list(prompt_ids), ids, logprobs, ids[-1] in eos_ids)

    def _only_model(self) -> str:
        # Adapters are listed too, each with the model that it is for.
        names = self._ask(
            "models", None, lambda answer: [str(one["id"]) for one in answer["data"] if not one.get("parent")]
        )
        if len(names) != 1:
            raise UsageError(
                f"the server at {self.config.url} serves {', '.join(names) or 'no model'}",
                "name one: server.model",
            )
        return names[0]

    def _ask(self, path: str, body: dict[str, Any] | None, read: Callable[[dict[str, Any]], Any]) -> Any:
        return self._request(
            path if path == "tokenize" else f"v1/{path}", body, lambda response: read(response.json())
        )

    def _request(self, path: str, body: dict[str, Any] | None, read: Callable[[httpx2.Response], Any]) -> Any:
        """Ask until there is an answer that `read` accepts, or patience is at an end."""
        config = self.config
        waiting = tenacity.stop_after_delay(config.patience)
        garbled = 0

        def enough(state: tenacity.RetryCallState) -> bool:
            nonlocal garbled
            if is_garbled := bool(state.outcome) and isinstance(state.outcome.exception(), _Garbled):
                garbled += 1
            return self._closed.is_set() or (garbled >= ATTEMPTS if is_garbled else waiting(state))

        def waits(state: tenacity.RetryCallState) -> None:
            with self._lock:
                first, self._waits = not self._waits, True
            if first and state.outcome:  # once, however many requests are in flight
                self.notify(f"waiting for the server at {config.url}: {state.outcome.exception()}")

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((_Gone, _Garbled)),
            stop=enough,
            before_sleep=waits,
            reraise=True,
            wait=tenacity.wait_exponential_jitter(multiplier=0.2, max=10),
            sleep=self._closed.wait,
        )
        try:
            return retrying(self._once, path, body, read)
        except _Gone as fault:
            raise OpdclError(
                f"no answer from the server at {config.url}: {fault}",
                "start it again; the same command goes on from the last checkpoint",
            ) from fault
        except _Garbled as fault:
            raise OpdclError(
                f"the server at {config.url} does not answer as it should: {fault}",
                "it must serve the same tokens and tell prompt_logprobs, as vLLM does: see --max-logprobs",
            ) from fault

    def _once(self, path: str, body: dict[str, Any] | None, read: Callable[[httpx2.Response], Any]) -> Any:
        try:
            response = self._client.post(path, json=body) if body is not None else self._client.get(path)
        except (httpx2.TransportError, RuntimeError) as fault:  # RuntimeError: closed by us
            raise _Gone(str(fault) or type(fault).__name__) from fault
        if response.status_code in (408, 425, 429) or response.status_code >= 500:
            raise _Gone(f"status {response.status_code}")
        if response.status_code == 404 and (name := (body or {}).get("model")) in self._adapters:
            self._load(name)  # it has been started anew since
            raise _Gone("it had lost an adapter, which is loaded again")
        if response.status_code >= 400:
            raise _refused(self.config, response)
        self._waits = False
        try:
            return read(response)
        except (ValueError, KeyError, TypeError, AttributeError) as fault:
            raise _Garbled(f"the answer cannot be read: {type(fault).__name__} {fault}"[:200]) from fault


def check_access(config: ServerSection) -> None:
    """Ask a server for its models, once, so that one which refuses us is known before anything is computed.

    That it does not answer is no reason to stop: it may be started until it is needed.

    Raises:
        UsageError: It refuses.
    """
    with _client(config) as client, contextlib.suppress(httpx2.TransportError):
        response = client.get("v1/models", timeout=5)
        if response.status_code in (
            401,
            403,
        ):  # 404 is no refusal: where the model is named, nobody needs the list
            raise _refused(config, response)


def _client(config: ServerSection) -> httpx2.Client:
    key = os.environ.get(KEY)
    return httpx2.Client(
        base_url=config.url.rstrip("/").removesuffix("/v1") + "/",
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx2.Timeout(config.timeout),
        limits=httpx2.Limits(
            max_connections=config.concurrency, max_keepalive_connections=config.concurrency
        ),
    )


def _refused(config: ServerSection, response: httpx2.Response) -> UsageError:
    hint = (
        f"set {KEY}"
        if response.status_code in (401, 403)
        else "check server.url, server.model and server.top_k"
    )
    return UsageError(
        f"the server at {config.url} refuses: status {response.status_code}, {response.text[:300]}", hint
    )


def _choice(answer: dict[str, Any]) -> dict[str, Any]:
    (choice,) = answer["choices"]
    return dict(choice)
