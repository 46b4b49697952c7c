"""What the drafters of a fleet were told, kept for those of workers to come."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator

from stretto.fleet.messages import Past, Remember

MESSAGE = 1 << 22  # bytes of responses that go into one message, about: a worker has to take it in one go


class Pasts:
    """The responses of each prompt's newest `window` visits, in at most `max_bytes`.

    As in a drafter's own index, visits count by prompt, so that those of an earlier run stay until the prompt has
    others; and where there are too many bytes, the prompt whose responses came in longest ago loses its oldest visit.
    """

    def __init__(self, window: int, max_bytes: int) -> None:
        self._window, self._max_bytes = window, max_bytes
        # responses by visit; the prompt that had new ones last at the end
        self._prompts: dict[str, dict[int, list[Past]]] = {}
        self.nbytes = 0

    def add(self, pasts: Iterable[Past]) -> None:
        for past in pasts:
            visits = self._prompts.pop(past.uid, {})
            visits.setdefault(past.visit, []).append(past)
            self.nbytes += past.nbytes
            self._prompts[past.uid] = visits
            if len(visits) > self._window:
                self._forget(visits)
        while self.nbytes > self._max_bytes:
            uid, visits = next(iter(self._prompts.items()))
            self._forget(visits)
            if not visits:
                del self._prompts[uid]

    def _forget(self, visits: dict[int, list[Past]]) -> None:
        self.nbytes -= sum(past.nbytes for past in visits.pop(min(visits)))

    def all(self) -> list[Past]:
        """In the order in which an index that is told them forgets what this would forget."""
        return [
            past for visits in self._prompts.values() for _, each in sorted(visits.items()) for past in each
        ]


def messages(pasts: Iterable[Past]) -> Iterator[bytes]:
    """`Remember` commands, packed, that tell of all of them."""
    part: list[Past] = []
    nbytes = 0
    for past in pasts:
        part.append(past)
        nbytes += past.nbytes
        if nbytes >= MESSAGE:
            yield pickle.dumps(Remember(part), pickle.HIGHEST_PROTOCOL)
            part, nbytes = [], 0
    if part:
        yield pickle.dumps(Remember(part), pickle.HIGHEST_PROTOCOL)
