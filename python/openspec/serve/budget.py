"""What all requests together may take of something."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from openspec.errors import RequestError
from openspec.serve.wire import overloaded


@dataclass(slots=True)
class Budget:
    """A count with a limit."""

    what: str
    most: int
    on_refusal: Callable[[], None]
    taken: int = 0

    @contextlib.contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Yields what takes more for one request; leaving gives all of that back.

        Taking raises:
            RequestError: the request alone exceeds the limit.
            ApiError: 503, others have taken too much.
        """
        own = 0

        def take(num: int) -> None:
            nonlocal own
            if own + num > self.most:
                raise RequestError(
                    f"The request has {own + num} {self.what}; this server takes up to {self.most} "
                    "at a time."
                )
            if self.taken + num > self.most:
                self.on_refusal()
                raise overloaded(
                    f"Other requests have taken {self.taken - own} of {self.most} {self.what}, and "
                    f"this one needs {own + num}; try again later.",
                    retry_after_s=1,
                )
            own += num
            self.taken += num

        try:
            yield take
        finally:
            self.taken -= own
