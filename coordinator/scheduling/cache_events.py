"""Mirror of the pages in the target workers' prefix caches, and a feed of its changes for subscribers. Pure.

Several workers may cache the same page. Subscribers see it until the last worker evicts it, and see only pages of their
own namespace.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

MAX_UNREAD = 4096
"""Maximum unread changes of a subscriber. Beyond that, it starts over."""

Namespace = tuple[str, str]


@dataclass(frozen=True, slots=True)
class CachedPage:
    """A full page of tokens. `parent`: digest of the page before it; None for the first one."""

    namespace: Namespace
    parent: bytes | None
    digest: bytes
    token_ids: "array[int]"


Change = CachedPage | bytes
"""A stored page, or the digest of a removed one."""


class Subscription:
    """A subscriber's unread changes. The first read returns all pages."""

    def __init__(self, pages: Callable[[], list[CachedPage]], wake: Callable[[], None]) -> None:
        """`pages`: returns all pages. `wake`: called after every change."""
        self._pages, self._wake = pages, wake
        self._starts_over = True
        self._unread: list[Change] = []

    def add(self, change: Change) -> None:
        if not self._starts_over:
            self._unread.append(change)
            if len(self._unread) > MAX_UNREAD:
                self._starts_over = True
                self._unread.clear()
        self._wake()

    def read(self) -> tuple[bool, Items[Change]]:
        """Return whether all earlier pages are void, and the new changes."""
        if self._starts_over:
            self._starts_over = False
            return True, self._pages()
        unread, self._unread = self._unread, []
        return False, unread


class CacheEvents:
    """Mirrors the cached pages of all target workers, with their tokens."""

    def __init__(self) -> None:
        self._pages: dict[bytes, CachedPage] = {}
        self._copies = Counter[bytes]()
        """Workers that hold each page."""
        self._subscriptions: dict[Namespace, list[Subscription]] = defaultdict(list)

    def stored(self, namespace: Namespace, parent: bytes | None, digest: bytes, token_ids: Items[int]) -> None:
        """Record that a worker has cached another page. The worker already holds all pages before it."""
        self._copies[digest] += 1
        if digest not in self._pages:
            self._pages[digest] = page = CachedPage(namespace, parent, digest, array("I", token_ids))
            self._publish(namespace, page)

    def removed(self, digest: bytes) -> None:
        """Record that a worker no longer holds a page."""
        self._copies[digest] -= 1
        if not self._copies[digest]:
            del self._copies[digest]
            self._publish(self._pages.pop(digest).namespace, digest)

    @contextmanager
    def subscribe(self, namespace: Namespace, wake: Callable[[], None]) -> Iterator[Subscription]:
        """Yield a subscription to the pages of a namespace."""
        subscriptions = self._subscriptions[namespace]
        subscription = Subscription(partial(self._cached, namespace), wake)
        subscriptions.append(subscription)
        try:
            yield subscription
        finally:
            subscriptions.remove(subscription)
            if not subscriptions:
                del self._subscriptions[namespace]

    def _publish(self, namespace: Namespace, change: Change) -> None:
        for subscription in self._subscriptions.get(namespace, ()):
            subscription.add(change)

    def _cached(self, namespace: Namespace) -> list[CachedPage]:
        """Return all pages that a new sequence could use, parents first."""
        followers = defaultdict[bytes | None, list[CachedPage]](list)
        for page in self._pages.values():
            if page.namespace == namespace:
                followers[page.parent].append(page)
        found = followers[None]
        for page in found:  # grows during iteration
            found += followers[page.digest]
        return found
