"""Grammars of `SamplingParams.structured_outputs` for an engine in this process."""

from __future__ import annotations

from typing import Protocol

from openspec.checkpoint.targets.config import ModelConfig
from openspec.errors import RequestError
from openspec.grammar.compiler import CompiledGrammar, GrammarCompiler, GrammarLimits
from openspec.messages import SamplingParams
from openspec.text.grammars.demand import chat_demand
from openspec.text.grammars.worker import COMMAND
from openspec.text.parsers.message import AnswerForm
from openspec.text.tokenizer import Tokenizer

PARAM = "structured_outputs"


class GrammarEngine(Protocol):
    """What loads grammars."""

    def set_vocabulary(self, tokens: list[bytes], vocab_size: int, stop_ids: list[int]) -> None:
        """The bytes of each token, once, before the first grammar."""

    def load_grammar(self, key: str, data: bytes) -> None:
        """A compiled grammar, for requests that name its key from here on."""

    def drop_grammar(self, key: str) -> None:
        """Forgets a grammar."""


class LoadedGrammars:
    """Compiles and loads what requests ask for. The processes that compile start on first use."""

    def __init__(
        self,
        engine: GrammarEngine,
        tokenizer: Tokenizer,
        model: ModelConfig,
        limits: GrammarLimits,
    ) -> None:
        self.form = AnswerForm.of(tokenizer, "auto", "auto")
        self._engine, self._tokenizer, self._model = engine, tokenizer, model
        self._limits = limits
        self._compiler: GrammarCompiler | None = None
        self._loaded: set[str] = set()
        self._held: list[CompiledGrammar] = []
        self._forgotten: list[str] = []

    def load(self, sampling: SamplingParams, thinking: bool | None) -> str:
        """The key of an answer's grammar in the engine; empty where nothing is asked for.

        The engine keeps it until `release`.

        Raises:
            RequestError: it cannot be enforced, or is refused.
            EngineError: the process that compiles ended, or the grammars held leave no room.
        """
        asked = sampling.structured_outputs
        if asked is None:
            return ""
        if sampling.ignore_eos:
            raise RequestError(f"ignore_eos and {PARAM} exclude each other", "ignore_eos")
        if sampling.min_tokens > 0:
            raise RequestError(f"min_tokens and {PARAM} exclude each other", "min_tokens")
        demand = chat_demand(self.form, thinking, asked, None)
        assert demand is not None
        compiler = self._started()
        grammar = compiler.compile(demand.encoded(PARAM), PARAM)
        compiler.hold(grammar)
        self._held.append(grammar)
        while self._forgotten:
            key = self._forgotten.pop()
            self._loaded.discard(key)
            self._engine.drop_grammar(key)
        if grammar.key not in self._loaded:
            self._loaded.add(grammar.key)
            self._engine.load_grammar(grammar.key, grammar.data)
        return grammar.key

    def release(self) -> None:
        """The requests that asked for grammars have ended."""
        while self._held and self._compiler is not None:
            self._compiler.release(self._held.pop())

    def close(self) -> None:
        """Ends the processes."""
        if self._compiler is not None:
            self._compiler.close()

    def _started(self) -> GrammarCompiler:
        if self._compiler is None:
            tokens = self._tokenizer.grammar_tokens(self.form.spelled_ids)
            vocab_size, stop_ids = self._model.vocab_size, list(self._model.eos_token_ids)
            self._engine.set_vocabulary(tokens, vocab_size, stop_ids)
            self._compiler = GrammarCompiler(
                COMMAND, tokens, vocab_size, stop_ids, self._limits, self._forgotten.append
            )
        return self._compiler
