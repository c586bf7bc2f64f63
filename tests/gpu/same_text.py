"""What an engine over several ranks must say of the toy's corpus, wherever its ranks are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsuf.config import read_environment
from dsuf.engine.engine import Engine
from dsuf.engine.messages import Request, Sampling
from dsuf.engine.options import EngineOptions
from recipes.toy.dataset import Example
from tests.support.rank_engine import stop_and_resume
from tests.toy.test_same_tokens import FEW, MANY, PAGE, answer_of, request_of, run

Examples = dict[str, Example]


def options_of(folder: Path, gpus: tuple[int, ...], **options: Any) -> EngineOptions:
    """Small caches, so that two engines fit on a device beside each other."""
    environment = read_environment()
    given = {"kernels": environment.kernels, "cache": environment.cache_dir, "max_context": 8192, "prefill_chunk": 512}
    return EngineOptions(folder, gpus=gpus, **{**given, "cache_tokens": 32768, **options})


class SameText:
    """Token for token; `engine` is a fixture of who inherits."""

    @pytest.mark.parametrize("drafting", [{"draft": False}, {"verify": 5}], ids=str)
    def test_text_is_that_of_the_corpus(self, engine: Engine, examples: Examples, drafting: dict[str, Any]) -> None:
        for name in FEW:
            assert run(engine, [request_of(examples[name], **drafting)]) == {name: answer_of(examples[name])}

    def test_the_page_is_the_same(self, engine: Engine, examples: Examples) -> None:
        assert run(engine, [request_of(examples[PAGE])]) == {PAGE: answer_of(examples[PAGE])}

    def test_a_batch_is_the_single_runs_random_ones_too(self, engine: Engine, examples: Examples) -> None:
        hot = Request("hot", examples["event.1"].ids[:20], 30, Sampling(temperature=0.9, seed=1, top_p=0.9), verify=5)
        alone = run(engine, [hot])["hot"]
        found = run(engine, [hot, *(request_of(examples[name]) for name in MANY[:7])])
        assert found.pop("hot") == alone
        assert found == {name: answer_of(examples[name]) for name in MANY[:7]}

    def test_a_stop_and_resume_and_a_rewind_change_no_token(self, engine: Engine, examples: Examples) -> None:
        engine.submit(request_of(examples["event.1"]))
        sequence, done = engine._sequences["event.1"], set()
        while not engine.idle:
            engine.step()
            if "resumed" not in done and len(sequence.emitted) > 12 and "event.1" in engine._sequences:
                stop_and_resume(engine, sequence, sequence.last_position // 2 * 2)
                done.add("resumed")
            elif "back" not in done and len(sequence.emitted) > 24 and "event.1" in engine._sequences:
                engine.backend.rewind(sequence, sequence.last_position - 7)
                done.add("back")
        assert done == {"resumed", "back"} and sequence.emitted == answer_of(examples["event.1"])

    def test_one_that_is_cancelled_leaves_nothing_behind(self, engine: Engine, examples: Examples) -> None:
        for name in FEW:
            engine.submit(request_of(examples[name]))
        for _ in range(8):
            engine.step()
        engine.cancel(FEW[0])
        while not engine.idle:
            engine.step()
        assert engine.backend._pages.free == engine.backend._pages.count
