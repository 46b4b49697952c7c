"""The ledger's books about groups: who belongs to one, how far it is, when it is over."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.records import Prompt


class Groups:
    """Indexes by group id. A group is `ready` when it has members and all that are left are SCORED."""

    def __init__(self) -> None:
        self.prompts: dict[int, Prompt] = {}
        self.members: dict[int, Sequence[int]] = {}  # request ids, ascending, without the discarded ones
        self.unscored: dict[int, int] = {}  # members without a reward; the groups that have not ended
        self.ready: dict[int, None] = {}  # in order of completion
        self._open: dict[int, int] = {}  # members neither consumed nor discarded
        self._kept: dict[int, int] = {}  # requests that are still to be logged

    def add(self, group: int, prompt: Prompt, members: Sequence[int]) -> None:
        """A group whose `members` have everything before them."""
        self.prompts[group] = prompt
        self.members[group] = members
        self.unscored[group] = self._open[group] = self._kept[group] = len(members)

    def restore(self, group: int, prompt: Prompt, request_id: int, *, scored: bool) -> None:
        """One more member of a group that is read back."""
        self.prompts[group] = prompt
        self.members[group] = [*self.members.get(group, ()), request_id]
        self.unscored[group] = self.unscored.get(group, 0) + (not scored)
        for table in (self._open, self._kept):
            table[group] = table.get(group, 0) + 1
        self._settle(group)

    def scored(self, group: int) -> None:
        """One more member has its reward."""
        self.unscored[group] = left = self.unscored[group] - 1
        if not left:
            self.ready[group] = None

    def unscore(self, group: int) -> None:
        """A scored member has lost its reward."""
        self.unscored[group] += 1
        self.ready.pop(group, None)

    def consumed(self, group: int, count: int) -> None:
        """So many scored members are over."""
        self._open[group] -= count
        self._settle(group)

    def discard(self, group: int, request_id: int, *, scored: bool) -> None:
        """A member is given up; the group goes on without it."""
        self.members[group] = [member for member in self.members[group] if member != request_id]
        self._open[group] -= 1
        self.unscored[group] -= not scored
        self._settle(group)

    def _settle(self, group: int) -> None:
        if self._open[group] == 0:
            del self.unscored[group], self._open[group]
            self.ready.pop(group, None)
        elif self.unscored[group] == 0:
            self.ready.setdefault(group, None)
        else:
            self.ready.pop(group, None)

    def forget(self, group: int, count: int) -> None:
        """So many of its requests have been logged and are over."""
        self._kept[group] -= count
        if self._kept[group] == 0:
            del self._kept[group], self.members[group], self.prompts[group]
