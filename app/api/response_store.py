"""Answers of /v1/responses that their client may continue or fetch, in memory and nowhere else."""

import asyncio
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic import BaseModel, ValidationError

from app.api.errors import ApiError, clip
from app.api.responses_schemas import ITEMS, Item

MAX_RESPONSES = 1024
SECONDS = 3600.0
CLIENT_PART = 8
"""A client may fill one part in so many of the bytes."""
_OVERHEAD = 2**10  # of a response, and a tenth of it of an item's id


@dataclass(frozen=True, slots=True)
class Turn:
    """A conversation so far: its items as JSON, without the brackets of their list, and their ids."""

    items: bytes
    ids: frozenset[str]

    @classmethod
    def of(cls, given: Sequence[Item]) -> "Turn":
        items = [_plain(item) for item in given]
        return cls(msgspec.json.encode(items)[1:-1], frozenset(item["id"] for item in items if item.get("id")))

    def then(self, other: "Turn") -> "Turn":
        return Turn(b",".join(filter(None, (self.items, other.items))), self.ids | other.ids)

    def read(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = msgspec.json.decode(b"[" + self.items + b"]")
        return items


@dataclass(frozen=True, slots=True)
class Stored:
    """A response as its client got it, and the conversation that it ends, whose system message is not in it."""

    owner: str
    turn: Turn
    response: bytes
    expiry: asyncio.TimerHandle

    @property
    def size(self) -> int:
        return _size(self.turn, self.response)


@dataclass
class ResponseStore:
    """Responses by id, each for its owner alone, for SECONDS. `max_bytes` 0 keeps none.

    Where they are too many, the oldest of the client that holds most is dropped.
    """

    max_bytes: int
    _stored: dict[str, Stored] = field(default_factory=dict)  # the oldest first
    _num_bytes: Counter[str] = field(default_factory=Counter)  # by owner

    @property
    def is_on(self) -> bool:
        return self.max_bytes > 0

    def keep(self, owner: str, turn: Turn, response: Mapping[str, Any]) -> bool:
        """Keep a response, and return True.

        Returns False for one with more bytes than a client may fill, or with a call that cannot be sent back, because
        its arguments are no JSON.
        """
        try:
            turn = turn.then(Turn.of(ITEMS.validate_python(response["output"])))
        except ValidationError:
            return False
        written = msgspec.json.encode(response)
        if (size := _size(turn, written)) > self.max_bytes // CLIENT_PART:
            return False
        identifier = response["id"]
        expiry = asyncio.get_running_loop().call_later(SECONDS, self._drop, identifier)
        self._stored[identifier] = Stored(owner, turn, written, expiry)
        self._num_bytes[owner] += size
        while self._num_bytes[owner] > self.max_bytes // CLIENT_PART:
            self._drop_oldest(owner)
        while len(self._stored) > MAX_RESPONSES or self._num_bytes.total() > self.max_bytes:
            self._drop_oldest(self._num_bytes.most_common(1)[0][0])
        return True

    def fits(self, turn: Turn) -> bool:
        """Return True if a client may fill as many bytes."""
        return _size(turn, b"") <= self.max_bytes // CLIENT_PART

    def get(self, owner: str, identifier: str) -> Stored | None:
        """Return a response, or None also for another client's."""
        found = self._stored.get(identifier)
        return found if found is not None and found.owner == owner else None

    def with_items(self, owner: str, ids: set[str]) -> tuple[list[Turn], set[str]]:
        """Return the owner's turns, the newest first, that have these items together, and the ids that none has."""
        turns, missing = list[Turn](), set(ids)
        for stored in reversed(self._stored.values()):
            if missing and stored.owner == owner and missing & stored.turn.ids:
                turns.append(stored.turn)
                missing -= stored.turn.ids
        return turns, missing

    def delete(self, owner: str, identifier: str) -> bool:
        """Drop a response. Returns False if there is none, also for another client's."""
        if self.get(owner, identifier) is None:
            return False
        self._drop(identifier)
        return True

    def gone(self, what: str, param: str | None, code: str) -> ApiError:
        """Return the 404 of a response or an item that is not here, with the reasons that there may be."""
        if not self.is_on:
            why = "This server keeps none (--response-store-bytes 0)."
        else:
            why = (
                f"It may be unknown, another client's, older than {SECONDS / 3600:g} h, pushed out by newer ones, from "
                "before a restart or of another replica. Answers with `store: false`, cut or failed ones are not kept."
            )
        return ApiError(
            404, f"{what} is not here. {why} Send the whole conversation as `input`.", param=param, code=code
        )

    def _drop_oldest(self, owner: str) -> None:
        self._drop(next(identifier for identifier, stored in self._stored.items() if stored.owner == owner))

    def _drop(self, identifier: str) -> None:
        stored = self._stored.pop(identifier)
        stored.expiry.cancel()
        self._num_bytes[stored.owner] -= stored.size
        if not self._num_bytes[stored.owner]:
            del self._num_bytes[stored.owner]


def new_id(prefix: str) -> str:
    """Return an id that nobody can guess: 128 random bits."""
    return f"{prefix}_{secrets.token_hex(16)}"


def _plain(value: Any) -> Any:
    """Return a model of an item as JSON, with the fields that were sent and mean something."""
    if isinstance(value, BaseModel):
        fields = [name for name in type(value).model_fields if name in value.model_fields_set]
        return {name: _plain(getattr(value, name)) for name in fields}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def shown(identifier: str) -> str:
    return f"`{clip(identifier)}`"


def _size(turn: Turn, response: bytes) -> int:
    ids = sum(len(identifier) + _OVERHEAD // 10 for identifier in turn.ids)
    return len(turn.items) + len(response) + ids + _OVERHEAD
