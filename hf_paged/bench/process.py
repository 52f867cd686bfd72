"""The runner's side of a peer: starting its process, asking and waiting, and what its process tree uses.

Owns the process, from start to the end of every child it left. Knows the line protocol's envelope (``ok``, ``error``)
and nothing of what is asked. An answer that does not come is an error, never a wait without end.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from hf_paged.bench.peers import PeerSpec
from hf_paged.errors import HfPagedError

_LAST_LINES = 12


class PeerError(HfPagedError):
    """A peer could not do what it was asked; the message is its own."""


class PeerDiedError(PeerError):
    """Its process ended, or was ended for not answering; another has to be started before it can be asked again."""


class PeerProcess:
    """A running peer.

    Args:
        spec: what to start.
        log: file for what it prints; a dead peer's error quotes its end.
        environment: variables on top of ours and the spec's.
    """

    def __init__(self, spec: PeerSpec, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.name, self.log = spec.name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors:
            try:
                self._process = subprocess.Popen(
                    spec.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env={**os.environ, **spec.environment, **(environment or {})},
                    start_new_session=True,  # an interrupt from the keyboard is the runner's to handle
                )
            except OSError as error:
                raise PeerDiedError(f"{spec.name} cannot be started: {error}") from error
        self.started = time.perf_counter()
        self._root = psutil.Process(self._process.pid)
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, order: str, timeout: float, **content: Any) -> dict[str, Any]:
        """Give an order and wait for its answer.

        Raises PeerError when the peer says that it failed, and PeerDiedError when its process ended or nothing came in
        ``timeout`` seconds; the process is then gone.
        """
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            raise PeerDiedError(f"it has ended, and cannot be asked to {order!r}")
        try:
            self._process.stdin.write(json.dumps({"do": order, **content}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended: the reader says so, and how
        answer = self._answer(order, timeout)
        if not answer.get("ok"):
            self._note(str(answer.get("traceback", "")))
            raise PeerError(str(answer.get("error", "no error was given")))
        return answer

    def tree(self) -> list[psutil.Process]:
        """The process and everything it started that still runs."""
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def suspend(self) -> None:
        """Halt every thread of it: a peer that waits busily must not take time from the one that is measured."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def reset_peak_memory(self) -> None:
        for process in self.tree():
            try:
                Path(f"/proc/{process.pid}/clear_refs").write_text("5", encoding="ascii")
            except OSError:  # it has ended, or this system has no such file: the peak is then the whole life's
                continue

    def peak_memory(self) -> int:
        """Bytes: the sum of what each process of the tree had in RAM at most since the last reset. Pages that several
        share count for each."""
        return sum(_peak(process.pid) for process in self.tree())

    def stop(self, timeout: float = 20) -> None:
        """Ask it to end, and end what is left of it."""
        if self._process.poll() is None:
            self.resume()
            try:
                self.ask("stop", timeout)
                self._process.wait(timeout)
            except (PeerError, subprocess.TimeoutExpired):
                pass  # ended below all the same
        self.kill()

    def kill(self) -> None:
        """End it and its children at once."""
        for process in reversed(self.tree()):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # children whose parent is gone are not in the tree any more
        except ProcessLookupError:
            pass
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # what was not yet written to a process that is gone
                pass

    def _answer(self, order: str, timeout: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            self.kill()
            raise PeerDiedError(f"no answer to {order!r} in {timeout:.0f} s; it was ended") from None
        if not line:
            status = self._process.wait()
            self.kill()
            raise PeerDiedError(f"its process ended with status {status} during {order!r}{self._last_words()}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            self.kill()
            raise PeerDiedError(f"it answered {order!r} with something that is not JSON: {line[:80]!r}") from None
        return answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._lines.put(line)
        except ValueError:
            pass  # closed by kill()
        self._lines.put(b"")

    def _signal(self, number: int) -> None:
        for process in self.tree():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def _note(self, text: str) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(text)

    def _last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return ": " + "\n".join(lines[-_LAST_LINES:]) if lines else ", and it printed nothing"


def _peak(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
