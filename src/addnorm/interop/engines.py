"""Engines: exported models that answer the verbs of a run in place of torch.

| engine | translate | generate | classify, label | predict |
|---|---|---|---|---|
| ctranslate2 | greedy and beam search | greedy and sampling | | |
| onnx | greedy | greedy and sampling, one step at a time | yes | yes |

Greedy tokens equal those of torch in float32. Beam search of CTranslate2 does not keep the greedy
path (`Decoding.keep_greedy`), so that it may find another output of about the same score.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from addnorm.config import ModelConfig
from addnorm.cpu import use_threads
from addnorm.data.text.batches import Batches
from addnorm.data.text.collate import pad as pad_rows
from addnorm.data.text.tokenizer import Tokenizer
from addnorm.errors import ConfigError, InputError, require
from addnorm.generate import Decoding, Hypothesis
from addnorm.generate.samplers import uniforms
from addnorm.generate.search import UNKNOWN_SCORE
from addnorm.generate.steps import Ids
from addnorm.interop.ctranslate2 import piece_names

PATIENCE = 2.0
"""Beam search ends after this many times `beam` complete outputs (Kasai et al. 2022, 2204.05424);
ours ends when no other can be the best. With CTranslate2's default of 1, 24 of 700 phrases of the
demo were wrong, and 5 with ours; with 2, all outputs are the same (docs/interop.md)."""
ROWS_PER_CALL = 1024
"""Rows of a table that onnxruntime computes at a time."""


class Engine:
    """What every engine is: a name, a precision, and the functions that it has."""

    name: str
    precision: str = "float32"

    def translate(
        self, sources: Iterable[Ids], decoding: Decoding, *, begin: int, end: int
    ) -> Iterator[list[Hypothesis]]:
        """Yield the best outputs of each source, as `addnorm.generate.translate` does."""
        raise self._cannot("translate")

    def generate(self, prompt: Ids, decoding: Decoding, *, end: int | None) -> Hypothesis:
        """Return a continuation of a prompt."""
        raise self._cannot("generate")

    def outputs(self, rows: Sequence[Ids], pad: int) -> list[Tensor]:
        """Return the output of the model for each row of ids, special tokens included."""
        raise self._cannot("classify")

    def predict(self, columns: Mapping[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        """Return probabilities, (rows, classes), or numbers, (rows,), of parsed columns."""
        raise self._cannot("predict")

    def _cannot(self, verb: str) -> ConfigError:
        return ConfigError(f"the engine {self.name} does not {verb}. Try --engine torch.")


class CTranslate2Engine(Engine):
    """A directory that `export_ctranslate2` wrote.

    Parameters
    ----------
    directory : the directory.
    config : the configuration of the model.
    tokenizers : one under "text", or two under "source" and "target".
    precision : what to compute in: float32 or int8.
    """

    name = "ctranslate2"

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        tokenizers: Mapping[str, Tokenizer],
        *,
        precision: str = "float32",
    ) -> None:
        self.directory, self.config, self.precision = directory, config, precision
        target = tokenizers.get("target") or tokenizers["text"]
        source = tokenizers.get("source") or target
        self.inputs = piece_names(source, config.vocab)
        self.outputs_ = piece_names(target, config.output_vocab)
        self.numbers = {name: number for number, name in enumerate(self.outputs_)}
        self.banned = sorted({target.begin, target.pad} - {target.end})
        self.library: Any = require("ctranslate2", "export")
        self.engines: dict[int, Any] = {}

    def _open(self, kind: str, workers: int) -> Any:
        if workers not in self.engines:
            with use_threads(None):  # loading sets the threads of OpenMP, and so those of torch
                self.engines[workers] = getattr(self.library, kind)(
                    str(self.directory),
                    device="cpu",
                    compute_type=self.precision,
                    inter_threads=workers,
                    intra_threads=max(1, torch.get_num_threads() // workers),
                )
        return self.engines[workers]

    def translate(
        self, sources: Iterable[Ids], decoding: Decoding, *, begin: int, end: int
    ) -> Iterator[list[Hypothesis]]:
        if decoding.penalty == "gnmt":
            raise ConfigError("CTranslate2 has no penalty gnmt. Try --engine torch.")
        rows = list(sources)
        if not rows:
            return
        names = [[self.inputs[number] for number in row] for row in rows]
        workers = self._workers(len(rows), decoding)
        share = -(-sum(map(len, rows)) // workers)  # tokens of each worker, so that none is idle
        found = self._open("Translator", workers).translate_batch(
            names,
            beam_size=decoding.beam,
            num_hypotheses=decoding.nbest,
            patience=PATIENCE if decoding.beam > 1 else 1.0,
            length_penalty=decoding.alpha if decoding.penalty == "length" else 0.0,
            max_decoding_length=max(decoding.limit(len(row)) for row in rows) - 1,
            min_decoding_length=0,
            max_input_length=0,
            max_batch_size=max(1, min(share, decoding.batch_tokens // decoding.beam)),
            batch_type="tokens",
            # A greedy search computes log Σ exp of all logits only for its score.
            return_scores=decoding.beam > 1,
            suppress_sequences=[[self.outputs_[number]] for number in self.banned],
        )
        # CTranslate2 has one limit for all sources, ours depends on each; the end counts.
        limits = [decoding.limit(len(row)) - 1 for row in rows]
        outputs = [[tokens[:limit] for tokens in result.hypotheses]
                   for result, limit in zip(found, limits, strict=True)]  # fmt: skip
        values = iter(
            self._log_probabilities(names, outputs, workers, share) if decoding.scores else ()
        )
        for texts, limit, result in zip(outputs, limits, found, strict=True):
            totals = result.scores or [UNKNOWN_SCORE] * len(texts)
            rated = [
                self._hypothesis(tokens, next(values, ()), total, len(tokens) < limit, decoding)
                for tokens, total in zip(texts, totals, strict=True)
            ]
            yield sorted(rated, key=lambda each: -each.score) if decoding.scores else rated

    def _hypothesis(
        self,
        tokens: Sequence[str],
        values: tuple[float, ...],
        score: float,
        finished: bool,
        decoding: Decoding,
    ) -> Hypothesis:
        """Return an output; with the log-probabilities of tokens, its score is that of torch.

        The probabilities in CTranslate2's own score are those without the forbidden tokens.
        """
        total = sum(values) if values else UNKNOWN_SCORE
        score = total / float(decoding.penalties(len(values))[-1]) if values else score
        ids = tuple(self.numbers[token] for token in tokens)
        return Hypothesis(ids, score, total, values, finished=finished)

    def _workers(self, rows: int, decoding: Decoding) -> int:
        """Return how many batches to translate at the same time.

        Two workers of one thread are much faster than one of two threads (docs/results/bench.md),
        if there are sources enough.
        """
        threads = torch.get_num_threads()
        return decoding.workers if decoding.workers > 1 or rows < 2 * threads else threads

    def _log_probabilities(
        self, sources: list[list[str]], outputs: list[list[list[str]]], workers: int, share: int
    ) -> Iterator[tuple[float, ...]]:
        """Yield the log-probability of each token, the end included, of all outputs in order."""
        pairs = [
            (source, text) for source, row in zip(sources, outputs, strict=True) for text in row
        ]
        found = self._open("Translator", workers).score_batch(
            *map(list, zip(*pairs, strict=True)),
            max_batch_size=max(1, share),
            batch_type="tokens",
            max_input_length=0,
        )
        yield from (tuple(each.log_probs) for each in found)

    def generate(self, prompt: Ids, decoding: Decoding, *, end: int | None) -> Hypothesis:
        if len(prompt) + decoding.limit(len(prompt)) > self.config.length:
            raise InputError(
                f"CTranslate2 does not go beyond the context of {self.config.length} tokens: the "
                f"prompt has {len(prompt)}. Ask for fewer with --tokens, or try --engine torch."
            )
        sample = decoding.sampler == "sample"
        if sample:
            self.library.set_random_seed(decoding.seed)
        (found,) = self._open("Generator", 1).generate_batch(
            [[self.outputs_[number] for number in prompt]],
            max_length=decoding.limit(len(prompt)),
            sampling_temperature=decoding.temperature if sample else 1.0,
            sampling_topk=(decoding.top_k or 0) if sample else 1,
            sampling_topp=decoding.top_p or 1.0,
            end_token=[] if end is None else [self.outputs_[end]],
            include_prompt_in_result=False,
            suppress_sequences=[
                [self.outputs_[number]] for number in self.banned if number not in prompt
            ],
        )
        ids = tuple(self.numbers[token] for token in found.sequences[0])
        return Hypothesis(ids, UNKNOWN_SCORE, UNKNOWN_SCORE, (), finished=end is not None)


def open_session(path: Path) -> Any:
    """Return a session of onnxruntime with as many threads as torch has."""
    library: Any = require("onnxruntime", "export")
    options = library.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return library.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class OnnxEngine(Engine):
    """A directory that `export_onnx` wrote, run by onnxruntime.

    Parameters
    ----------
    directory : the directory.
    config : the configuration of the model.
    """

    name = "onnx"

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        self.directory, self.config = directory, config
        self.sessions: dict[str, Any] = {}

    def _run(self, file: str, *inputs: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        if file not in self.sessions:
            self.sessions[file] = open_session(self.directory / file)
        session = self.sessions[file]
        names = [item.name for item in session.get_inputs()]
        answers: list[np.ndarray[Any, Any]] = session.run(
            None, dict(zip(names, inputs, strict=True))
        )
        return answers

    def outputs(self, rows: Sequence[Ids], pad: int) -> list[Tensor]:
        if self.config.mode != "encoder":
            raise self._cannot("classify with this model")
        found: dict[int, Tensor] = {}
        for part in Batches([[len(row) for row in rows]], 8192).epoch(0) if rows else []:
            ids = pad_rows([list(rows[i]) for i in part], pad).numpy()
            lengths = np.array([len(rows[i]) for i in part])
            real = np.arange(ids.shape[1]) < lengths[:, None]
            answers = torch.from_numpy(self._run("model.onnx", ids, real)[0])
            for place, index in enumerate(part):
                answer = answers[place]
                found[index] = answer[: lengths[place]] if answer.ndim > 1 else answer
        return [found[index] for index in range(len(rows))]

    def translate(
        self, sources: Iterable[Ids], decoding: Decoding, *, begin: int, end: int
    ) -> Iterator[list[Hypothesis]]:
        if decoding.beam > 1:
            raise ConfigError(
                f"the engine onnx translates greedily: got beam={decoding.beam}. Try --beam 1, or "
                "--engine ctranslate2."
            )
        banned = sorted({begin, *([] if self.config.pad is None else [self.config.pad])} - {end})
        for row in sources:
            source, real = np.array([row], dtype=np.int64), np.ones((1, len(row)), dtype=bool)
            memory = self._run("encoder.onnx", source, real)[0]
            state = self._empty(self.config.depths["decoder"])
            token, ids, total = begin, [], []
            limit = decoding.limit(len(row))
            for place in range(limit):
                step = np.array([[token]], dtype=np.int64)
                logits, state = self._run("step.onnx", step, state, memory, real)
                scores = torch.from_numpy(logits[0]).log_softmax(-1)
                allowed = scores.clone()
                allowed[banned] = -torch.inf
                token = end if place == limit - 1 else int(allowed.argmax())
                total.append(float(scores[token]))
                if token == end:
                    break
                ids.append(token)
            score = sum(total) / float(decoding.penalties(len(total))[-1])
            ended = len(total) < limit
            yield [Hypothesis(tuple(ids), score, sum(total), tuple(total), finished=ended)]

    def _empty(self, depth: int) -> np.ndarray[Any, Any]:
        """Return the cache before the first step: keys and values of no position."""
        c = self.config
        shape = (depth, 2, 1, c.effective_kv_heads, 0, c.effective_head_width)
        return np.zeros(shape, dtype=np.float32)

    def generate(self, prompt: Ids, decoding: Decoding, *, end: int | None) -> Hypothesis:
        c, limit = self.config, decoding.limit(len(prompt))
        if c.positions == "learned" and len(prompt) + limit > c.length:
            raise InputError(
                f"the engine onnx does not go beyond the context of {c.length} tokens: the prompt "
                f"has {len(prompt)}. Ask for fewer with --tokens, or try --engine torch."
            )
        state = self._empty(c.depth)
        for token in prompt:
            step = np.array([[token]], dtype=np.int64)
            logits, state = self._run("step.onnx", step, state)
        sampler, chance = decoding.make_sampler(), uniforms([decoding.seed], limit)
        ids: list[int] = []
        total: list[float] = []
        for place in range(limit):
            scores = torch.from_numpy(logits).clone()
            if c.pad is not None and c.pad != end:
                scores[:, c.pad] = -torch.inf
            token = int(sampler(scores, chance[:, place])[0])
            total.append(float(torch.from_numpy(logits).log_softmax(-1)[0, token]))
            if token == end:
                break
            ids.append(token)
            logits, state = self._run("step.onnx", np.array([[token]], dtype=np.int64), state)
        return Hypothesis(tuple(ids), sum(total), sum(total), tuple(total), finished=token == end)


class OnnxTableEngine(Engine):
    """A directory that `export_onnx_table` wrote, run by onnxruntime.

    Parameters
    ----------
    directory : the directory.
    """

    name = "onnx"

    def __init__(self, directory: Path) -> None:
        self.session = open_session(directory / "model.onnx")

    def predict(self, columns: Mapping[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        inputs = {}
        for item in self.session.get_inputs():
            column = columns[item.name]
            if item.type == "tensor(string)":  # "" is how the graph writes a missing text
                column = np.array([text or "" for text in column.tolist()], dtype=object)
            inputs[item.name] = column
        rows = len(next(iter(inputs.values())))
        parts = [
            self.session.run(
                None, {name: column[i : i + ROWS_PER_CALL] for name, column in inputs.items()}
            )[0]
            for i in range(0, rows, ROWS_PER_CALL)
        ]
        return np.concatenate(parts)
