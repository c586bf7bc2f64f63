"""Servers that share caches, in threads of this process: web, engine and agent of each are the real ones.

The scripted backend's pages are a function of the ids, and it checks those that it is given, so that a wrong page fails
a test as it would spoil an answer.
"""

from __future__ import annotations

import asyncio
import functools
import json
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import uvloop
from tokenizers import Tokenizer

from dsuf.engine.engine import Engine
from dsuf.engine.kv_tier import connect_tier
from dsuf.engine.options import EngineOptions
from dsuf.engine.service import run_service
from dsuf.kv.agent import AgentOptions
from dsuf.kv.client import WebClient
from dsuf.kv.process import AgentThread
from dsuf.server.app import bind, build_app, serve
from dsuf.server.link import EngineLink
from dsuf.server.options import ServerOptions
from dsuf.server.prefixes import Prefixes
from dsuf.text.tokenizer import v41_tokenizer_json
from tests.support.scripted import PAGE_BYTES, STATE_BYTES, ScriptedBackend
from tests.support.serving import encode, v41_spec, v41_text, wait_until

MODEL = "deepseek-v4.1-flash"


@functools.cache
def shared_text():
    text = v41_text(context_limit=100_000, tokenizer_json=v41_tokenizer_json().decode())
    text.encoder.load()
    return text


@functools.cache
def _tokenizer():
    return Tokenizer.from_str(v41_tokenizer_json().decode())


class Answers:
    """What the scripted model says: by the last thing that it was asked; an id list is said as it stands."""

    def __init__(self, answers=None):
        self.answers = dict(answers or {})
        self._said = {}

    def __call__(self, request, index):
        ids = self._said.get(request.id)
        if ids is None:
            ids = self._said[request.id] = [*self._answer(request.prompt_ids), v41_spec().eos_token_id]
        return ids[min(index, len(ids) - 1)]

    def _answer(self, prompt_ids):
        prompt = _tokenizer().decode(prompt_ids, skip_special_tokens=False)
        asked = prompt.rpartition("<｜User｜>")[2].rpartition("<｜Assistant｜>")[0]
        answer = self.answers.get(asked, f"I heard: {asked}")
        if isinstance(answer, list):
            return answer
        thinks = prompt.endswith("<think>") and "</think>" not in answer
        return encode(f"hm, hm</think>{answer}" if thinks else answer)


class SharedServer:
    def __init__(self, folder, name, answers, paths, api_keys, key_names, resume_tokens, step_s):
        runtime = folder / "run"
        runtime.mkdir(mode=0o700, exist_ok=True)
        self.kv_socket = folder / f"{name}.kv"
        kept = AgentOptions(
            *(16 << 20, PAGE_BYTES, STATE_BYTES, b"scripted".ljust(32), runtime, self.kv_socket, "scripted"),
            paths=paths,
            resume_tokens=resume_tokens,
        )
        self.agent = AgentThread(kept)
        self.agent.start()
        self.lines, self.headers = [], {}
        path = folder / f"{name}.engine"
        options = ServerOptions(api_keys=api_keys, key_names=key_names or {}, drain_delay_s=0, drain_timeout_s=2)
        prefixes = Prefixes(WebClient(self.kv_socket), resume_tokens)
        self.app = build_app(EngineLink(path), shared_text(), options, self.lines.append, prefixes)
        sock = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self._loop = uvloop.new_event_loop()
        backend = ScriptedBackend(
            vocab_size=v41_spec().vocab_size,
            max_context=100_000,
            script=answers,
            tokens_a_step=lambda sequence: 3,
            chunk=512,
            step_s=step_s,
            sleep=time.sleep,
        )
        engine_options = EngineOptions(folder, resume_every=resume_tokens)

        def engine(progress):
            tier = connect_tier(self.kv_socket, backend.limits)
            tier.measured = lambda rows, seconds: None  # a script computes so fast that no pull would be worth it
            return Engine(backend, engine_options, tier=tier)

        works = (lambda: self._serve(sock), lambda: run_service(path, engine))
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in self._threads:
            thread.start()
        wait_until(lambda: self.app.state.service.link.state == "ready")

    def _serve(self, sock):
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(serve(self.app, sock))

    def ask(self, messages, **more):
        """(message, cached tokens, prompt tokens, completion tokens with the ending one, source)."""
        body = {"model": MODEL, "messages": messages, "max_tokens": 4000, **more}
        reply = httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=self.headers, timeout=20)
        document = reply.json()
        assert reply.status_code == 200, document
        usage, choice = document["usage"], document["choices"][0]
        wait_until(lambda: self.log()[-1:] and self.log()[-1]["reply_tokens"] == usage["completion_tokens"])
        ended = choice["finish_reason"] in ("stop", "tool_calls")
        source = self.log()[-1]["cache_source"]
        return Turn(choice["message"], usage["prompt_cache_hit_tokens"], usage["prompt_tokens"],
                    usage["completion_tokens"] + ended, source)  # fmt: skip

    def told(self, messages, stream, leave_after=None, **more):
        """(what the client got of the answer, prompt tokens); it leaves after so many pieces if told to."""
        body = {"model": MODEL, "messages": messages, "stream": stream, **more}
        ends = len(self.log())
        if not stream:
            answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=20).json()
            heard = [answer["choices"][0]["message"]["content"]]
        else:
            heard = []
            with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=20) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        heard += [json.loads(line[6:])["choices"][0]["delta"].get("content") or ""]
                    if leave_after and sum(map(bool, heard)) == leave_after:
                        break
        wait_until(lambda: len(self.log()) > ends)
        return "".join(heard), self.log()[-1]["prompt_tokens"]

    def log(self):
        """request_end lines."""
        lines = [json.loads(line) for line in self.lines]
        return [{**line, "reply_tokens": line["completion_tokens"]} for line in lines if line["event"] == "request_end"]

    def metrics(self):
        return httpx.get(f"{self.url}/metrics", headers=self.headers).text

    def close(self):
        self._loop.call_soon_threadsafe(self.app.state.drain.on_signal, signal.SIGINT)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        self.agent.stop()
        self._loop.close()


@dataclass(frozen=True)
class Turn:
    message: dict
    cached: int
    prompt: int
    completion: int  # the ending token counted
    source: str


@contextmanager
def sharing_servers(
    folder, names="ab", answers=None, paths=("shm", "tcp"), api_keys=(), key_names=None, resume_tokens=512, step_s=0.0
):
    script, made = Answers(answers), []
    _tokenizer()
    try:
        for name in names:
            made.append(SharedServer(folder, name, script, paths, api_keys, key_names, resume_tokens, step_s))
        yield made
    finally:
        for server in made:
            server.close()
