"""Which parameters are trained. A frozen one has no gradient, no exchange, no optimizer state and no weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxdl.core.errors import ConfigError
from jaxdl.core.patterns import check_patterns, matches
from jaxdl.parallel.sharding import Params


@dataclass(frozen=True)
class Trainable:
    """Selects the trained parameters of trees like the parameters; without patterns, all of them."""

    treedef: Any = None
    """The structure of the parameters; None if all are trained."""
    flags: tuple[bool, ...] = ()
    """For each parameter whether it is trained."""

    def of(self, tree: Any) -> Any:
        """`tree`, like the parameters down to their leaves, with None in place of what belongs to frozen ones."""
        if self.treedef is None:
            return tree
        leaves = self.treedef.flatten_up_to(tree)
        return self.treedef.unflatten(leaf if flag else None for leaf, flag in zip(leaves, self.flags, strict=True))

    def flags_of(self, tree: Any) -> Any:
        """For each leaf of `tree`, which is like the parameters, whether it is trained."""
        if self.treedef is None:
            return jax.tree.map(lambda _: True, tree)
        return self.treedef.unflatten(self.flags)

    def merged(self, trained: Any, tree: Any) -> Any:
        """`tree` with the trained leaves replaced by those of `trained`, a result of `of`."""
        if self.treedef is None:
            return trained
        pairs = zip(self.treedef.flatten_up_to(trained), self.treedef.flatten_up_to(tree), self.flags, strict=True)
        return self.treedef.unflatten(new if flag else old for new, old, flag in pairs)


EVERYTHING = Trainable()
"""No parameter is frozen."""


def make_trainable(patterns: Sequence[str], params: Params, only: Sequence[str] = ()) -> Trainable:
    """Freezes the parameters that a pattern selects, and those that none of `only` selects, if it has any.

    `params` may be shape structs.

    Raises ConfigError for a pattern that selects none, and when none would be trained.
    """
    if not patterns and not only:
        return EVERYTHING
    names = param_names(params)
    check_patterns(patterns, names, "--step.freeze")
    flags = tuple(
        not any(matches(name, pattern) for pattern in patterns)
        and (not only or any(matches(name, pattern) for pattern in only))
        for name in names
    )
    if not any(flags):
        raise ConfigError(
            f"--step.freeze {' '.join(patterns)}: all {len(names)} parameters would be frozen, so nothing would be "
            "trained. Leave some out."
        )
    return Trainable(jax.tree.structure(params), flags)


def param_names(params: Params) -> list[str]:
    """The names of parameters, `stem/kernel`, as --explain prints them."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
