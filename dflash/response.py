"""One decoded answer, its cycles, and how it compares with the target's own."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Response:
    """One decoded answer.

    acceptance_lengths: tokens kept of every cycle (accepted drafts + 1; the last may be cut by a stop token or the
    limit). drafted, accepted: per slot 1..B-1, in how many cycles the slot was proposed, and accepted with all before.
    rivals: for each output token those whose logit was within rounding of the best (greedy).
    """

    output_ids: list[int] = field(default_factory=list)
    acceptance_lengths: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    rivals: list[tuple[int, ...]] = field(default_factory=list, compare=False)


def first_difference(ours: Response, own: Response) -> str:
    """How a greedy answer compares with the target's own: `identical`, `ties` or `wrong`.

    A tie: where they first differ, one run had the other's token within rounding of its own, so the shape of the batch
    decided between them. Whatever follows differs for that reason.
    """
    if ours.output_ids == own.output_ids:
        return "identical"
    places = range(min(len(ours.output_ids), len(own.output_ids)))
    where = next((place for place in places if ours.output_ids[place] != own.output_ids[place]), None)
    if where is None:
        return "wrong"
    swapped = own.output_ids[where] in ours.rivals[where] or ours.output_ids[where] in own.rivals[where]
    return "ties" if swapped else "wrong"


def kept_tokens(tokens: list[int], room: int, stop_ids: Sequence[int]) -> tuple[list[int], bool]:
    """The tokens that stay: at most `room`, up to and with the first stop token; and whether the text ends here."""
    tokens = tokens[:room]
    for index, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: index + 1], True
    return tokens, len(tokens) == room


def count_slots(response: Response, good: int, kept: int) -> None:
    """Slot statistics of a cycle; slots past the end of the text were never asked for."""
    whole = kept == good + 1  # else the text ended inside the block
    for slot in range(len(response.drafted) if whole else kept):
        response.drafted[slot] += 1
        response.accepted[slot] += slot < good
