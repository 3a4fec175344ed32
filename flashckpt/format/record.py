"""What all records have in common: a kind, a bound on their bytes, and checksummed JSON as their form."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from flashckpt.format.checked_json import dump, parse
from flashckpt.format.fields import Fields
from flashckpt.format.names import AttemptName

R = TypeVar("R", bound="JsonRecord")


class JsonRecord:
    """One small file. The kind stands inside, so that a file moved to another's name is refused."""

    __slots__ = ()
    KIND: ClassVar[str]
    MAX_BYTES: ClassVar[int] = 1 << 16

    def to_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    @classmethod
    def from_fields(cls: type[R], fields: Fields) -> R:
        raise NotImplementedError

    def to_bytes(self) -> bytes:
        """The file's bytes. ValueError where they would be more than MAX_BYTES, or could not be read back."""
        data = dump({"kind": self.KIND, **self.to_dict()})
        if len(data) > self.MAX_BYTES:
            raise ValueError(f"a {self.KIND} of {len(data)} bytes; at most {self.MAX_BYTES} can be read back")
        return data

    @classmethod
    def from_bytes(cls: type[R], data: bytes, what: str) -> R:
        """Validated in full. Raises DamagedError or FormatError; `what` names the file in them."""
        fields = Fields(parse(data, what=what, max_bytes=cls.MAX_BYTES), what)
        kind = fields.text("kind")
        if kind != cls.KIND:
            fields.refuse(f"it is a {kind[:20]!r} where a {cls.KIND!r} should be")
        return cls.from_fields(fields)


def attempt_of(fields: Fields, key: str) -> AttemptName:
    """The attempt that a field names."""
    name = AttemptName.parse(fields.text(key, max_chars=32))
    if name is None:
        fields.refuse(f"{key!r} names no attempt")
    return name
