"""Peer: llama.cpp through the C API of llama-cpp-python; ``make bench-peers`` installs it.

The library has no scheduler to call, so continuous batching is a loop here: each step decodes one token of every
running sequence, and fills what is left of the step with prompts. A prefix that all requests share, and a prompt of
several samples, is computed once and copied. Keys and values are fp16, the default, in half precision, else fp32.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from pathlib import Path

import llama_cpp as lib
import numpy as np
from gguf_file import write_gguf
from hf_paged_peer import Peer, Work, serve

_STEP_TOKENS = 512
#: shorter common beginnings are not worth a copy
_WORTH_SHARING = 64
#: ggml's numbers of types
_F32, _F16 = 0, 1


@dataclass
class _Sequence:
    """One completion. ``todo`` are prompt tokens not yet computed; ``forks`` begin as copies of it once it has a
    token."""

    id: int
    want: int
    todo: list[int]
    position: int = 0
    out: list[int] = field(default_factory=list)
    forks: list[_Sequence] = field(default_factory=list)


class LlamaCppPeer(Peer):
    packages = ("llama_cpp_python",)

    def prepare(self) -> None:
        self.path = Path(self.job.scratch) / f"{self.job.dtype}.gguf"
        if not self.path.is_file():
            part = self.path.with_suffix(".part")
            write_gguf(Path(self.job.model), self.job.dtype, part)
            part.rename(self.path)

    def load(self) -> None:
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(str(self.path).encode(), lib.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {self.path.name}; its log says why")
        self.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(_STEP_TOKENS, 0, 1)
        self.context = None

    def reset(self, work: Work) -> None:
        """A context of its own for each work: room is divided by the number of sequences."""
        if self.context is not None:
            lib.llama_free(self.context)
        params = lib.llama_context_default_params()
        params.n_seq_max = len(work.requests) * work.samples
        longest = max(len(request.prompt) + request.out for request in work.requests)
        params.n_ctx = params.n_seq_max * (-(-longest // 256) * 256)
        params.n_batch = params.n_ubatch = _STEP_TOKENS
        params.n_threads = params.n_threads_batch = self.job.threads
        params.type_k = params.type_v = _F32 if self.job.dtype == "float32" else _F16
        self.context = lib.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp has no room for {params.n_seq_max} sequences of {longest} tokens")
        self.memory = lib.llama_get_memory(self.context)

    def run(self, work: Work) -> list[list[list[int]]]:
        self.random = np.random.default_rng(work.seed) if work.samples > 1 else None
        sequences = [
            [_Sequence(index * work.samples + k, request.out, list(request.prompt)) for k in range(work.samples)]
            for index, request in enumerate(work.requests)
        ]
        for first, *others in sequences:
            first.forks = others
        waiting = [group[0] for group in sequences]
        self._share(waiting, work.shared_prefix())
        running: list[_Sequence] = []
        while waiting or running:
            running += self._step(running, waiting)
            running = [sequence for sequence in running if len(sequence.out) < sequence.want]
        return [[sequence.out for sequence in group] for group in sequences]

    def _share(self, waiting: list[_Sequence], length: int) -> None:
        """Compute the common beginning in the first sequence and copy it to the others."""
        length = min([length, *(len(sequence.todo) - 1 for sequence in waiting)])
        if len(waiting) < 2 or length < _WORTH_SHARING:
            return
        first = waiting[0]
        tail, first.todo = first.todo[length:], first.todo[:length]
        while first.todo:
            self._add_prompt(first, _STEP_TOKENS, wanted=False)
            self._decode()
        first.todo = tail
        for other in waiting[1:]:
            lib.llama_memory_seq_cp(self.memory, first.id, other.id, -1, -1)
            other.todo, other.position = other.todo[length:], length

    def _step(self, running: list[_Sequence], waiting: list[_Sequence]) -> list[_Sequence]:
        """One pass; returns the sequences that have their first token now, and takes them from ``waiting``."""
        rows: list[tuple[_Sequence, int]] = []
        for sequence in running:
            rows.append((sequence, self.batch.n_tokens))
            self._add(sequence, sequence.out[-1], wanted=True)
        begun: list[_Sequence] = []
        while waiting and self.batch.n_tokens < _STEP_TOKENS:
            sequence = waiting[0]
            self._add_prompt(sequence, _STEP_TOKENS - self.batch.n_tokens, wanted=True)
            if sequence.todo:
                break
            rows.append((sequence, self.batch.n_tokens - 1))
            begun.append(waiting.pop(0))
        self._decode()
        for sequence, row in rows:
            sequence.out.append(self._choose(row))
            for fork in sequence.forks:
                lib.llama_memory_seq_cp(self.memory, sequence.id, fork.id, -1, -1)
                fork.position = sequence.position
                fork.out.append(self._choose(row))
                begun.append(fork)
            sequence.forks = []
        return begun

    def _add_prompt(self, sequence: _Sequence, room: int, wanted: bool) -> None:
        part, sequence.todo = sequence.todo[:room], sequence.todo[room:]
        for number, token in enumerate(part):
            self._add(sequence, token, wanted and not sequence.todo and number == len(part) - 1)

    def _add(self, sequence: _Sequence, token: int, wanted: bool) -> None:
        batch, row = self.batch, self.batch.n_tokens
        batch.token[row], batch.pos[row], batch.logits[row] = token, sequence.position, wanted
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence.id
        batch.n_tokens += 1
        sequence.position += 1

    def _decode(self) -> None:
        status = lib.llama_decode(self.context, self.batch)
        if status != 0:
            raise RuntimeError(f"llama_decode ended with {status}")
        self.batch.n_tokens = 0

    def _choose(self, row: int) -> int:
        pointer = lib.llama_get_logits_ith(self.context, row)
        logits = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self.vocabulary,))
        if self.random is None:
            return int(logits.argmax())
        # the largest of scores plus Gumbel noise is a sample of their softmax
        noise = -np.log(self.random.standard_exponential(self.vocabulary, dtype=np.float32))
        return int((logits + noise).argmax())


if __name__ == "__main__":
    serve(LlamaCppPeer())
