"""Tables by name that a user's own package can join, by a decorator or by an entry point.

An entry point of the table's group names a module that adds the entry when it is imported, or the entry itself:

    [project.entry-points."metavd.datasets"]
    mine = "my_package.mine"

Nothing is imported before its name is asked for: names come from the table's own list and from the packages' metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Entries by name: those built in first, in their order, then those of other packages."""

    def __init__(
        self, what: str, group: str, kind: type[T], error: type[Exception], built_in: Mapping[str, str] | None = None
    ) -> None:
        """Describe an empty table.

        Args:
            what: what messages call an entry.
            group: the group of entry points.
            kind: the type of an entry.
            error: raised, with one sentence, where another package's entry cannot be had.
            built_in: names whose entries are added by importing a module, given with its full name.
        """
        self._what, self.group, self._kind, self._error = what, group, kind, error
        self._built_in = dict(built_in or {})
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> None:
        """Add an entry; a name that is taken is refused, because one of the two would be lost."""
        if name in self._built_in:  # what is built in comes first, whoever was imported first
            import_module(self._built_in[name])
        if self._entries.setdefault(name, entry) is not entry:
            raise self._error(f"There is already a {self._what} {name!r}; choose another name.")

    @cached_property
    def _points(self) -> dict[str, EntryPoint]:
        from importlib.metadata import entry_points  # noqa: PLC0415 (brings the email package with it)

        return {point.name: point for point in entry_points(group=self.group)}

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            if name in self._built_in:
                import_module(self._built_in[name])
            else:
                self._load(self._points[name])
        return self._entries[name]

    def _load(self, point: EntryPoint) -> None:
        package = point.dist.name if point.dist is not None else point.value
        try:
            entry = point.load()
        except Exception as error:  # whatever somebody else's module raises
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(".")
            raise self._error(
                f"The {self._what} {point.name!r} of the package {package!r} cannot be imported ({reason}); "
                "update or remove that package."
            ) from error
        if isinstance(entry, self._kind):
            self._entries.setdefault(point.name, entry)
        if point.name not in self._entries:
            raise self._error(
                f"The package {package!r} names {point.value!r} for the {self._what} {point.name!r}, but that adds no "
                f"such {self._what}; update or remove that package."
            )

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._built_in or name in self._points

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._built_in, *self._entries, *self._points)))

    def __len__(self) -> int:
        return len(list(iter(self)))
