"""Owns which question a ticket stands for: the n-th ticket is the n-th question of the seeded shuffle."""

from core.arrays import Int64
from core.choice import draw, order
from core.errors import DataError


class Tickets:
    """Maps ticket numbers to question positions; every epoch is a new shuffle of all questions."""

    def __init__(self, seed: int, questions: int) -> None:
        if questions < 1:
            raise DataError("there are no questions to hand out, expected at least one")
        self._seed = seed
        self._questions = questions
        self._orders: dict[int, Int64] = {}

    def __repr__(self) -> str:
        return f"<Tickets {self._questions} questions, seed {self._seed}>"

    def position(self, ticket: int) -> int:
        """Return the question's position, 0..questions-1, of `ticket` (from 0)."""
        epoch, place = divmod(ticket, self._questions)
        if epoch not in self._orders:
            # A worker adopts tickets of the epoch before; older orders are recomputed if ever needed.
            self._orders = {e: known for e, known in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = order(draw(self._seed, "tickets", epoch, count=self._questions))
        return int(self._orders[epoch][place])
