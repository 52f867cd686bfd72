"""A second set of module objects over the same parameters: the engine's own way into a model that stays its user's.

Switching the user's module to ``eval()`` or changing its config for the length of a step would be seen by whoever uses
it meanwhile (a training loop, another thread). A view shares every parameter and buffer by reference, also those that
are assigned later, and has its own ``training`` flags, which stay False.
"""

from __future__ import annotations

import functools
import types
from typing import Any, TypeVar

import torch

#: of a table of positions that stand for padding, at most
_PADDING_PLACES = 4

M = TypeVar("M", bound=torch.nn.Module)


def view_of(model: M) -> M:
    """New module objects for ``model`` and all below it, sharing the dicts of parameters and buffers, in eval mode.

    What modules keep besides (numbers, configs, hooks) is shared by reference. Bound methods and partial functions that
    refer to the old modules, as accelerate's hooks leave them, are bound to the new ones. What was compiled runs
    uncompiled.
    """
    twins: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        twin = object.__new__(type(module))
        twin.__dict__.update(module.__dict__)
        twin.__dict__["training"] = False
        if module._compiled_call_impl is not None:  # the shapes of steps are not those it was compiled for
            twin.__dict__["_compiled_call_impl"] = None
        twins[id(module)] = twin
    for module in model.modules():
        twin = twins[id(module)]
        children = {name: None if child is None else twins[id(child)] for name, child in module._modules.items()}
        twin.__dict__["_modules"] = children
        for name, value in module.__dict__.items():
            rebound = _rebound(value, twins)
            if rebound is not value:
                twin.__dict__[name] = rebound
    found = twins[id(model)]
    assert isinstance(found, type(model))
    return found


def input_device(model: Any) -> torch.device:
    """Where token ids go. Weights that accelerate keeps elsewhere are on "meta"; its hook knows where they run."""
    embeddings = model.get_input_embeddings()
    device: torch.device = embeddings.weight.device
    if device.type != "meta":
        return device
    hook = getattr(embeddings, "_hf_hook", None)
    for found in (hook, *getattr(hook, "hooks", ())):  # a sequence of hooks has them inside
        if getattr(found, "execution_device", None) is not None:
            return torch.device(found.execution_device)
    return device


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether torch.compile was applied to the model or any of its modules, in place or as its ``forward``."""
    return any(
        module._compiled_call_impl is not None
        or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
        or "_orig_mod" in module._modules
        for module in model.modules()
    )


def static_rope_length(model: Any) -> int | None:
    """Tokens up to which rotary embeddings do not depend on how long the longest sequence of a forward is; None where
    they never do. Beyond, sequences in one forward would change each other."""
    lengths = []
    for module in model.modules():
        kinds, config = module.__dict__.get("rope_type"), module.__dict__.get("config")
        listed = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if "longrope" in listed:
            given = getattr(config, "rope_parameters", None) or {}
            parameters = given.values() if isinstance(kinds, dict) else (given,)
            lengths += [p["original_max_position_embeddings"] for p in parameters if p.get("rope_type") == "longrope"]
        if "dynamic" in listed:
            lengths.append(int(config.max_position_embeddings))
    return min(lengths, default=None)


def learned_positions(model: Any) -> int | None:
    """Tokens that a model has positions for, where it looks them up in a table; None where it computes them."""
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if not isinstance(longest, int):
        return None
    tokens = model.get_input_embeddings().weight
    tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding) and m.weight is not tokens]
    tables += [buffer for buffer in model.buffers() if buffer.ndim > 1]
    # some tables begin with places for padding
    found = any(longest <= size <= longest + _PADDING_PLACES for table in tables for size in table.shape[:-1])
    return longest if found else None


def _rebound(value: Any, twins: dict[int, torch.nn.Module]) -> Any:
    """``value`` with every reference to an old module replaced, as far as such references are usual."""
    if isinstance(value, torch.nn.Module):
        return twins.get(id(value), value)
    value = getattr(value, "_torchdynamo_orig_callable", value)
    owner = getattr(value, "__self__", None)
    if isinstance(owner, torch.nn.Module) and id(owner) in twins:
        function = getattr(value, "__func__", None)  # of whatever kind: torchao binds partial ones
        return value if function is None else types.MethodType(function, twins[id(owner)])
    if isinstance(value, functools.partial):
        args = tuple(_rebound(a, twins) for a in value.args)
        func = _rebound(value.func, twins)
        if func is not value.func or any(a is not b for a, b in zip(args, value.args, strict=True)):
            made = functools.partial(func, *args, **value.keywords)
            made.__dict__.update(value.__dict__)
            return made
    if type(value) in (list, tuple):
        items = [_rebound(v, twins) for v in value]
        if any(a is not b for a, b in zip(items, value, strict=True)):
            return type(value)(items)
    return value


def same_structure(model: torch.nn.Module, view: torch.nn.Module) -> bool:
    """Whether a view still has the modules its model has, with the same attributes: adapters come and go (PEFT), are
    chosen and switched off by attributes of modules, and then the view is built anew."""
    mine, theirs = dict(model.named_modules()), dict(view.named_modules())
    if mine.keys() != theirs.keys():
        return False
    twins = {id(module): theirs[name] for name, module in mine.items()}
    return all(_same_attributes(module, theirs[name], twins) for name, module in mine.items())


def _same_attributes(module: torch.nn.Module, twin: torch.nn.Module, twins: dict[int, torch.nn.Module]) -> bool:
    mine, theirs = module.__dict__, twin.__dict__
    if type(module) is not type(twin) or mine.keys() != theirs.keys():
        return False
    changed = [
        name for name, value in mine.items() if value is not theirs[name] and name not in ("training", "_modules")
    ]
    # what refers to modules was bound to the view's, so it is another object there
    return all(_rebound(mine[name], twins) is not mine[name] for name in changed)
