"""Storage that asks, before each call that changes something, whether its process still lives."""

from __future__ import annotations

from abc import abstractmethod

from flashckpt.store.system import System


class MortalSystem(System):
    """`live` is called first, and does not return where the process ends."""

    @abstractmethod
    def live(self) -> None: ...

    def create(self, name: str, folder: int) -> int:
        self.live()
        return super().create(name, folder)

    def write(self, file: int, data: memoryview) -> int:
        self.live()
        return super().write(file, data)

    def sync(self, file: int) -> None:
        self.live()

    def sync_folder(self, folder: int) -> None:
        self.live()

    def link(self, source: str, target: str, source_folder: int, target_folder: int) -> None:
        self.live()
        super().link(source, target, source_folder, target_folder)

    def rename(self, source: str, target: str, folder: int) -> None:
        self.live()
        super().rename(source, target, folder)

    def make_folder(self, name: str, folder: int) -> None:
        self.live()
        super().make_folder(name, folder)

    def remove(self, name: str, folder: int) -> None:
        self.live()
        super().remove(name, folder)

    def remove_folder(self, name: str, folder: int) -> None:
        self.live()
        super().remove_folder(name, folder)
