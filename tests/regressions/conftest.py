"""Engines are checked after every regression test, too."""

from tests.engine.conftest import _books_balance as _books_balance
