"""Following a file that another process appends lines to."""

from __future__ import annotations

from pathlib import Path


class Tail:
    """The lines that are added to a file after this moment; one that is not whole yet waits."""

    def __init__(self, path: Path, most: int = 20 * 2**20) -> None:
        """most: bytes; a file that grows beyond is emptied (its writer appends)."""
        self._path, self._most = path, most
        self._at = path.stat().st_size if path.is_file() else 0

    def new(self) -> list[str]:
        """Those since the last call."""
        try:
            size = self._path.stat().st_size
            if size < self._at:
                self._at = 0
            with self._path.open("rb") as file:
                file.seek(self._at)
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._at += len(whole)
            if size > self._most:
                with self._path.open("r+b") as file:
                    file.truncate(0)
                self._at = 0
        except OSError:
            return []
        return whole.decode("utf-8", errors="replace").splitlines()


__all__ = ["Tail"]
