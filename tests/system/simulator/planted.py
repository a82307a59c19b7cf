"""Bugs to plant in the real code. The simulator must find each of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from coordinator.requests.in_flight import RequestsInFlight
from coordinator.scheduling.commits import Commit
from coordinator.workers.link import WorkerLink
from coordinator.workers.releases import Releases
from specpool.drafting import draft_shares
from specpool.drafting.draft_models import DraftModel
from specpool.engine.cache.pages import PagePool
from specpool.engine.run.sequences import SequenceEngine
from specpool.protocol import responses
from specpool.protocol.rounds import VerifyRound
from target_worker.verifier import Verifier

read_statuses = responses._read_statuses
send = Releases.send
committed = RequestsInFlight.committed
continue_round = Verifier._continue
drop = PagePool.drop


def _read_any_round(response: Any, round_id: int, items: Any) -> Any:
    return read_statuses(response, response.round_id, items)


async def _send_once(self: Releases) -> bool:
    await send(self)
    self.forget()
    return True


def _commit_twice(self: RequestsInFlight, commits: Iterable[Commit]) -> None:
    """Commit a round twice if an earlier attempt has failed."""
    once = list(commits)
    committed(self, [*once, *(commit for commit in once if commit.sequence.blame.failures)])


def _promote_first_branch(self: Verifier, round_: VerifyRound) -> Iterator[Any]:
    """Promote the first branch with the right number of accepted tokens, whatever the token after them."""
    branches = {item.sequence_id: item.branches for item in round_.items}
    items = {item.sequence_id: item for item in round_.items}
    for (owner, sequence_id), (after, found) in continue_round(self, round_):
        for branch in branches[sequence_id]:
            if branch.num_accepted == found.num_accepted:
                items[sequence_id].token_ids = (branch.token_id,)
                break
        yield (owner, sequence_id), (after, found)


def _free_shared_pages(self: PagePool, pages: Sequence[int]) -> None:
    """Free pages that other sequences still hold."""
    self._references |= dict.fromkeys(pages, 1)
    drop(self, pages)


def _share_equally(models: Sequence[DraftModel], fixed: Mapping[str, float]) -> dict[DraftModel, float]:
    return {model: 1 / len(models) for model in models}


def _accept_any_instance(self: WorkerLink, response: Any) -> None:
    pass


BUGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a skipped round check": lambda: mock.patch.object(responses, "_read_statuses", _read_any_round),
    "a lost release": lambda: mock.patch.object(Releases, "send", _send_once),
    "a doubled commit": lambda: mock.patch.object(RequestsInFlight, "committed", _commit_twice),
    "an outcome promoted for the wrong branch": lambda: mock.patch.object(Verifier, "_continue", _promote_first_branch),
    "a page freed while shared": lambda: mock.patch.object(PagePool, "drop", _free_shared_pages),
    "a carried draft that keeps its slots": lambda: mock.patch.object(Verifier, "release", SequenceEngine.release),
    "a share for a withdrawn draft": lambda: mock.patch.object(draft_shares, "_fixed_shares", _share_equally),
    "an answer of an earlier life": lambda: mock.patch.object(WorkerLink, "_check_instance", _accept_any_instance),
}
"""Contexts in which the real code has a bug."""
