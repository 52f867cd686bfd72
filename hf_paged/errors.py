"""The exception tree of hf_paged.

    HfPagedError
    ├── ConfigError(ValueError)          an argument or option is wrong; the message says what to change
    │   └── UnknownOptionError(TypeError)  there is no option of this name
    ├── UnsupportedError(ValueError)     a valid wish that this model, backend or version cannot honour
    ├── InvalidRequestError(ValueError)  one request is bad (token ids outside the vocabulary, empty prompt)
    ├── OutOfBlocksError(RuntimeError)   the KV pool is too small for what was asked
    ├── EngineDeadError(RuntimeError)    the engine's loop has ended; its cause is chained
    ├── EnginePausedError(RuntimeError)  who would wait for the engine is who paused it
    └── InternalError(RuntimeError)      an invariant of ours is broken: a bug worth a report

Every class also derives from the built-in exception its kind of mistake usually raises, so code that already
catches ``ValueError`` around ``generate()`` keeps working.
"""

from __future__ import annotations


class HfPagedError(Exception):
    """Base class of everything this package raises on purpose."""


class ConfigError(HfPagedError, ValueError):
    """An argument or option has a value that can never work."""


class UnknownOptionError(ConfigError, TypeError):
    """A keyword that is no option; what Python itself raises for one is a TypeError."""


class UnsupportedError(HfPagedError, ValueError):
    """The request is well formed, but this model, backend or library version cannot honour it."""


class InvalidRequestError(HfPagedError, ValueError):
    """One request is bad; others are not affected."""


class OutOfBlocksError(HfPagedError, RuntimeError):
    """The KV pool cannot hold what was asked for, even after evicting every cached prefix.

    Attributes:
        needed: blocks that the operation had to allocate.
        available: blocks that were free or evictable at that moment.
    """

    def __init__(self, message: str, *, needed: int, available: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class EngineDeadError(HfPagedError, RuntimeError):
    """The engine's loop has ended, by a fault (``__cause__``) or because it was closed; it takes no more requests."""


class EnginePausedError(HfPagedError, RuntimeError):
    """The thread that paused an engine asks it to go on, and would wait for itself: call ``resume()`` first."""


class InternalError(HfPagedError, RuntimeError):
    """An internal invariant does not hold; the state of the component that raised it is suspect."""
