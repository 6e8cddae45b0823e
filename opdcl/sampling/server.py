"""A client for a completions endpoint that returns log-probabilities of prompts, such as vLLM's.

Ids are sent and ids come back, so every log-probability belongs to the intended token. An answer that is
incomplete, has another length or other tokens, or contains invalid log-probabilities is requested again and
never used. The client waits for an unreachable server.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from typing import Any

import httpx2
import tenacity
import torch

from opdcl.config.model import SERVED_TOKENS, WHOLE_VOCABULARY, is_this_machine
from opdcl.errors import OpdclError, UsageError
from opdcl.model.distributions import LogProbs, Served, TopTokens
from opdcl.words import Prompt, Rollout

# The key, and the address of the one server that may have it. Without the address, it is one of this machine.
KEY, OWNER = "OPDCL_SERVER_KEY", "OPDCL_SERVER_URL"

# Attempts at a valid answer: one failure may be an accident, three are how this server answers.
ATTEMPTS = 3

# Requests in flight, unless it is said; the server queues what is too many. Seconds until one has failed, and
# until an unreachable server is given up.
IN_FLIGHT, TIMEOUT, PATIENCE = 32, 600.0, 600.0

# Distributions kept until they are needed. Whole ones are large: 4 bytes a token of the vocabulary, and in
# transit a hundred times that, so few are requested at once.
CACHE_SIZE, WHOLE_CACHE_SIZE = 4096, 16
WHOLE_IN_FLIGHT = 2

# How far rounding may take a probability above one.
TOLERANCE = 1e-3

Ids = Sequence[int]
Json = dict[str, Any]


class _Unreachable(Exception):
    """The server cannot be reached, or reports that it cannot answer now."""


class _InvalidAnswer(Exception):
    """The answer failed a check."""


class Server:
    """A client that keeps many requests in flight over persistent connections.

    `vocabulary` is the number of token ids; `notify` is called with a message when the server is unreachable.
    `named` is how many of the likeliest tokens are requested at each scored position, or `WHOLE_VOCABULARY`.
    """

    def __init__(
        self,
        url: str,
        vocabulary: int,
        notify: Callable[[str], None] = lambda text: None,
        in_flight: int = IN_FLIGHT,
        named: int = SERVED_TOKENS,
        model: str | None = None,
    ):
        self.url, self.vocabulary, self.notify, self.named = url, vocabulary, notify, named
        self._client = _client(url, in_flight)
        self._closed = threading.Event()
        # Identical requests share an answer.
        kept = WHOLE_CACHE_SIZE if self.is_whole else CACHE_SIZE
        self._scored = functools.lru_cache(kept)(self._start_to_score)
        self._turns = threading.Semaphore(WHOLE_IN_FLIGHT if self.is_whole else in_flight)
        self._adapters: dict[str, str] = {}
        self._waiting = False
        self._lock, self._adapter_lock = threading.Lock(), threading.Lock()
        self.model = model or self._only_model()
        # Its threads are daemons: the process must be able to exit while an answer is pending.
        self._pool = ThreadPool(in_flight)

    @property
    def is_whole(self) -> bool:
        """Whether whole distributions are requested."""
        return self.named == WHOLE_VOCABULARY

    def close(self) -> None:
        """Abandon all requests in flight."""
        self._closed.set()
        self._pool.close()
        self._client.close()

    def encode(self, text: str) -> list[int]:
        """Return the server tokenizer's ids of a text, without added special tokens."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return self._request("tokenize", body, lambda answer: list(map(int, answer["tokens"])))

    def score(self, prompt_ids: Ids, completion_ids: Ids) -> AsyncResult[Served]:
        """Request the distribution of a completion in the background."""
        return self._scored(tuple(prompt_ids), tuple(completion_ids))

    def _start_to_score(self, prompt_ids: Ids, completion_ids: Ids) -> AsyncResult[Served]:
        return self._pool.apply_async(self._score, (prompt_ids, completion_ids))

    def complete(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        eos_ids: Ids,
        temperature: float = 1.0,
        seed: int = 0,
        model: str | None = None,
        on_finished: Callable[[list[Rollout]], None] | None = None,
    ) -> list[Rollout]:
        """Complete prompts with the served model or a loaded adapter; temperature 0 is greedy decoding."""
        options = {
            "model": model or self.model,
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "logprobs": 0,
            "return_token_ids": True,
            "stop_token_ids": list(eos_ids),
            "skip_special_tokens": False,
            "add_special_tokens": False,
            # Override the checkpoint's own defaults.
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }

        def complete_one(index: int) -> tuple[int, Rollout]:
            prompt = prompts[index]
            body = options | {"prompt": prompt.ids, "seed": (seed * 1_000_003 + index) % 2**31}

            def read(answer: Json) -> Rollout:
                return self._rollout(answer, prompt, eos_ids, max_new_tokens)

            return index, self._request("v1/completions", body, read)

        rollouts: dict[int, Rollout] = {}
        for index, rollout in self._pool.imap_unordered(complete_one, range(len(prompts))):
            rollouts[index] = rollout
            if on_finished:
                on_finished([rollout])
        return [rollouts[index] for index in range(len(prompts))]

    @contextlib.contextmanager
    def adapter(self, folder: Path) -> Iterator[str]:
        """Load an adapter on the server, which must see its folder; yield its name for requests."""
        name = f"opdcl-{uuid.uuid4().hex[:12]}"
        self._adapters[name] = str(folder.resolve())
        self._load(name)
        try:
            yield name
        finally:
            del self._adapters[name]
            # One short attempt: a server that is down holds no adapters.
            with contextlib.suppress(httpx2.TransportError, RuntimeError):
                self._client.post("v1/unload_lora_adapter", json={"lora_name": name}, timeout=10)

    def _load(self, name: str) -> None:
        body = {"lora_name": name, "lora_path": self._adapters[name]}
        try:
            # Many requests may miss the adapter at once; one of them loads it.
            with self._adapter_lock:
                self._request("v1/load_lora_adapter", body)
        except UsageError as error:
            if "already" in error.message:
                return
            raise UsageError(
                error.message,
                "start it with `opdcl serve RUN`, or with --enable-lora, a sufficient --max-lora-rank, and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, on a machine that can read the run directory",
            ) from error

    def _score(self, prompt_ids: Ids, completion_ids: Ids) -> Served:
        body = _scoring(self.model, [*prompt_ids, *completion_ids], self.named)

        def read(answer: Json) -> Served:
            rows = self._rows(answer, prompt_ids, completion_ids)
            return self._whole(rows) if self.is_whole else self._top_tokens(rows, completion_ids)

        with self._turns:
            return self._request("v1/completions", body, read)

    def _rows(self, answer: Json, prompt_ids: Ids, completion_ids: Ids) -> list[dict[int, float]]:
        """Return the log-probabilities at each completion token, after checking that they are about these."""
        (choice,) = answer["choices"]
        rows = choice["prompt_logprobs"]
        if len(rows) != (expected := len(prompt_ids) + len(completion_ids)):
            raise _InvalidAnswer(f"log-probabilities of {len(rows)} tokens came back for {expected}")
        read = []
        for token, row in zip(completion_ids, rows[len(prompt_ids) :], strict=True):
            logprobs = {int(name): float(value["logprob"]) for name, value in row.items()}
            if token not in logprobs:
                raise _InvalidAnswer(f"no log-probability of token {token}: the server read other tokens")
            read.append(logprobs)
        return read

    def _whole(self, rows: list[dict[int, float]]) -> LogProbs:
        """Return whole distributions; rows beyond the vocabulary are padding of a larger model."""
        everything = set(range(len(rows[0])))
        for logprobs in rows:
            if logprobs.keys() != everything:
                raise _InvalidAnswer(f"{len(logprobs)} tokens are named where all were requested")
            self._check((), logprobs.values())
            if abs((mass := sum(map(math.exp, logprobs.values()))) - 1) > TOLERANCE:
                raise _InvalidAnswer(f"all tokens have a probability of {mass:.3f} together")
        ids = range(min(len(everything), self.vocabulary))
        return LogProbs(torch.tensor([[logprobs[i] for i in ids] for logprobs in rows]))

    def _top_tokens(self, rows: list[dict[int, float]], completion_ids: Ids) -> TopTokens:
        """Return the likeliest tokens of each position."""
        k = self.named
        token_logprobs, top_ids, top_logprobs = [], [], []
        for token, logprobs in zip(completion_ids, rows, strict=True):
            self._check(logprobs, logprobs.values())
            top = sorted(logprobs, key=lambda name: logprobs[name], reverse=True)[:k]
            if len(top) < k:
                raise _InvalidAnswer(f"{len(top)} tokens are named where {k} were requested")
            if (mass := sum(math.exp(logprobs[name]) for name in top)) > 1 + TOLERANCE:
                raise _InvalidAnswer(f"the top tokens have a probability of {mass:.3f} together")
            token_logprobs.append(logprobs[token])
            top_ids.append(top)
            top_logprobs.append([logprobs[name] for name in top])
        return TopTokens(
            torch.tensor(completion_ids),
            torch.tensor(token_logprobs),
            torch.tensor(top_ids),
            torch.tensor(top_logprobs),
        )

    def _rollout(self, answer: Json, prompt: Prompt, eos_ids: Ids, max_new_tokens: int) -> Rollout:
        """Return the completion in an answer, after checking that it is complete."""
        (choice,) = answer["choices"]
        ids = [int(token) for token in choice["token_ids"]]
        logprobs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
        if len(ids) != len(logprobs) or not 0 < len(ids) <= max_new_tokens:
            counts = f"{len(ids)} tokens came with {len(logprobs)} log-probabilities"
            raise _InvalidAnswer(f"{counts}, where at most {max_new_tokens} were requested")
        self._check(ids, logprobs)
        finished = ids[-1] in eos_ids
        if not finished and len(ids) < max_new_tokens:
            raise _InvalidAnswer(f"a completion broke off after {len(ids)} of {max_new_tokens} tokens")
        return Rollout(prompt, ids, logprobs, finished)

    def _check(self, ids: Iterable[int], logprobs: Iterable[float]) -> None:
        if (token := next((i for i in ids if not 0 <= i < self.vocabulary), None)) is not None:
            raise _InvalidAnswer(f"token {token} is none of {self.vocabulary}")
        for value in logprobs:
            if not math.isfinite(value) or value > TOLERANCE:
                raise _InvalidAnswer(f"{value} is no log-probability")

    def _only_model(self) -> str:
        # Adapters are listed too, with the model that they belong to as their parent.
        def read(answer: Json) -> list[str]:
            return [str(model["id"]) for model in answer["data"] if not model.get("parent")]

        names = self._request("v1/models", None, read)
        if len(names) != 1:
            message = f"the server at {self.url} serves {', '.join(names) or 'no model'}"
            raise UsageError(message, "serve one; for a teacher, name one: server.model")
        return names[0]

    def _request(self, path: str, body: Json | None, read: Callable[[Json], Any] | None = None) -> Any:
        """Retry a request until `read` accepts the answer, or raise why it never did."""
        url, closed = self.url, tenacity.stop_when_event_set(self._closed)
        pauses: dict[str, Any] = {
            "wait": tenacity.wait_exponential_jitter(multiplier=0.2, max=10),
            "sleep": tenacity.sleep_using_event(self._closed),
            "reraise": True,
        }
        until_reached = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_Unreachable),
            stop=tenacity.stop_after_delay(PATIENCE) | closed,
            before_sleep=self._notify_once,
            **pauses,
        )
        until_valid = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_InvalidAnswer),
            stop=tenacity.stop_after_attempt(ATTEMPTS) | closed,
            **pauses,
        )
        try:
            return until_valid(until_reached, self._request_once, path, body, read)
        except _Unreachable as error:
            raise OpdclError(
                f"no answer from the server at {url}: {error}",
                "start it again, then run the same command again to resume from the last checkpoint",
            ) from error
        except _InvalidAnswer as error:
            raise OpdclError(
                f"the server at {url} does not answer as it should: {error}",
                "it must serve the same tokens and return prompt_logprobs, as vLLM does: see --max-logprobs",
            ) from error

    def _notify_once(self, state: tenacity.RetryCallState) -> None:
        """Tell the user that we wait for the server, once per outage."""
        with self._lock:
            first, self._waiting = not self._waiting, True
        if first and state.outcome:
            self.notify(f"waiting for the server at {self.url}: {state.outcome.exception()}")

    def _request_once(self, path: str, body: Json | None, read: Callable[[Json], Any] | None) -> Any:
        try:
            response = self._client.post(path, json=body) if body is not None else self._client.get(path)
        except (httpx2.TransportError, RuntimeError) as error:  # RuntimeError: `close` was called
            raise _Unreachable(str(error) or type(error).__name__) from error
        if response.status_code in (408, 425, 429) or response.status_code >= 500:
            raise _Unreachable(f"status {response.status_code}")
        if response.status_code == 404 and (name := (body or {}).get("model")) in self._adapters:
            self._load(name)
            raise _Unreachable("it was restarted without an adapter, which is loaded again")
        if response.status_code >= 400:
            raise _refused(self.url, response)
        self._waiting = False
        try:
            return read(response.json()) if read else None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"the answer cannot be read: {type(error).__name__} {error}"
            raise _InvalidAnswer(message[:200]) from error


def check_access(
    url: str, named: int | None = None, model: str | None = None, sends_key: bool = True
) -> None:
    """Request a server's models once, so that a refusal is known before anything is computed.

    With `named`, that many of the likeliest tokens are requested too. An unreachable server is accepted: it
    may be started before it is needed. So is 404, because nothing needs the list of models if
    `server.model` is set. Unless this `sends_key`, a server that asks for the key is accepted if it is the
    one that the run will send it to.

    Raises:
        UsageError: The server refuses the key, or to name as many tokens.
    """
    with _client(url, sends_key=sends_key) as client, contextlib.suppress(httpx2.TransportError):
        response = client.get("v1/models", timeout=5)
        if response.status_code in (401, 403):
            if not sends_key and _key_of(client.base_url):
                return
            raise _refused(url, response)
        if named is not None and model:
            response = client.post("v1/completions", json=_scoring(model, [0, 0], named))
            if _names_too_few(response):
                raise _refused(url, response)


def _scoring(model: str, ids: Ids, named: int) -> Json:
    """Return a request for the distributions of a text's tokens."""
    return {
        "model": model,
        "prompt": list(ids),
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": named,
        "return_token_ids": True,
        "add_special_tokens": False,
    }


def _names_too_few(response: httpx2.Response) -> bool:
    return response.status_code == 400 and "logprobs" in response.text


def _client(url: str, in_flight: int = 1, sends_key: bool = True) -> httpx2.Client:
    client = httpx2.Client(
        base_url=url.rstrip("/").removesuffix("/v1") + "/",
        timeout=httpx2.Timeout(TIMEOUT),
        limits=httpx2.Limits(max_connections=in_flight, max_keepalive_connections=in_flight),
    )
    if sends_key and (key := _key_of(client.base_url)):
        client.headers["Authorization"] = f"Bearer {key}"
    return client


def _key_of(server: httpx2.URL) -> str:
    """Return the key of a server; "" if there is none, or it belongs to another origin."""
    key, owner = os.environ.get(KEY, "").strip(), os.environ.get(OWNER, "").strip()
    if not owner:
        return key if is_this_machine(server.host) else ""
    try:
        return key if _origin(httpx2.URL(owner)) == _origin(server) else ""
    except httpx2.InvalidURL as fault:
        raise UsageError(f"{OWNER} is no address: {fault}", f"{OWNER}=http://HOST:PORT") from fault


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme)


def _refused(url: str, response: httpx2.Response) -> UsageError:
    status, hint = response.status_code, "check server.url, and server.model of a teacher"
    if status in (401, 403):
        hint = f"set {KEY}, and {OWNER}={url}: the key goes to that server only"
    if _names_too_few(response):
        hint = (
            "start it with --max-logprobs -1, which allows whole distributions; or use recover.loss.kind "
            f"policy_gradient, or top_k with recover.loss.k at most {SERVED_TOKENS}, which need no more"
        )
    return UsageError(f"the server at {url} refuses: status {status}, {response.text[:300]}", hint)
