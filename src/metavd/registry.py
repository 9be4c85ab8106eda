"""What exists by name: our own entries, and those of installed packages.

A package joins by an entry point: importing what it names registers the package's entries.

    [project.entry-points."metavd.methods"]
    mine = "my_package.my_method"

Our own entries are known at once. Packages are imported when somebody asks for all entries or for a name that is not
ours; one that cannot be imported is described in one sentence and left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Generic, TypeVar

from .errors import UserError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Entries by name, ours first, in the order in which they were added."""

    def __init__(self, group: str, ours: Sequence[str] = ()) -> None:
        self.group = group
        """Of the entry points of packages."""
        self.ours = ours
        """Modules that add our own entries when they are imported."""
        self.broken: list[str] = []
        """One sentence for each package that could not be imported."""
        self._found: dict[str, T] = {}
        self._homes: dict[str, str] = {}
        self._offered: Sequence[EntryPoint] | None = None
        self._asked_us = self._asked_packages = False

    def add(self, name: str, entry: T, module: str) -> None:
        """Register an entry of a module; the same module may define it anew, another one may not take its name."""
        if self._homes.setdefault(name, module) != module:
            raise UserError(f"{name!r} of {module} is taken by {self._homes[name]}; choose another name")
        self._found[name] = entry

    def own(self) -> Mapping[str, T]:
        """Return our entries, and those that the session itself or a package has added so far."""
        if not self._asked_us:
            self._asked_us = True
            for module in self.ours:
                import_module(module)
            # In our order, whoever imported one of our modules first.
            place = {module: number for number, module in enumerate(self.ours)}
            order = sorted(self._found, key=lambda name: place.get(self._homes[name], len(place)))
            self._found = {name: self._found[name] for name in order}
        return self._found

    def all(self) -> Mapping[str, T]:
        """Return all entries, those of installed packages too."""
        self.own()
        if not self._asked_packages:
            self._asked_packages = True
            for point in self._points():
                self._import(point)
        return self._found

    def names(self) -> set[str]:
        """Return the names that are known without importing anything: what was added so far, and packages' offers."""
        return {*self._found, *(point.name for point in self._points())}

    def _points(self) -> Sequence[EntryPoint]:
        """Return what installed packages offer; they are looked for once."""
        if self._offered is None:
            from importlib.metadata import entry_points  # noqa: PLC0415 (a tenth of the time of --help)

            self._offered = tuple(entry_points(group=self.group))
        return self._offered

    def __contains__(self, name: object) -> bool:
        """Whether there is an entry of that name; packages are asked only where it is not ours."""
        return name in self.own() or name in self.all()

    def __getitem__(self, name: str) -> T:
        return self.own()[name] if name in self.own() else self.all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.all())

    def __len__(self) -> int:
        return len(self.all())

    def _import(self, point: EntryPoint) -> None:
        before = dict(self._found), dict(self._homes)
        try:
            point.load()
        except Exception as error:  # whatever a package may do wrong
            self._found, self._homes = before
            package = point.dist.name if point.dist is not None else point.value
            what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self.broken.append(f"the package {package} offers {point.value} to {self.group}, which fails: {what}")
